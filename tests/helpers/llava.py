"""A tiny random LLaVA in a folder, as ``from_pretrained`` takes it."""

import torch
import transformers

from lightning_fcl.models.tiny_lessons import vocabulary
from lightning_fcl.models.tiny_llava import make_config, make_processor


def save_random_llava(path, *, width=32, layers=1):
    """Write model and processor with the words of the shipped one; always the same weights."""
    torch.manual_seed(0)
    tokenizer, _ = vocabulary()
    model = transformers.LlavaForConditionalGeneration(make_config(tokenizer, width=width, layers=layers))
    model.save_pretrained(path)
    make_processor(tokenizer).save_pretrained(path)
    return path
