"""The tiny LLaVA that is shipped with the library: its shape, its words, and where its files lie."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_fcl._imports import optional_import

TINY_LLAVA = Path(__file__).parent / "tiny_llava"
"""The shipped model's folder, as ``from_pretrained`` takes it."""
IMAGE_SIZE, PATCH = 32, 4
IMAGE_TOKENS = (IMAGE_SIZE // PATCH) ** 2
SPECIAL = ("<unk>", "<pad>", "<s>", "</s>", "<image>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}{% endfor %} "
    "{% else %}ASSISTANT: {{ message['content'][0]['text'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_PIECES = r" ?[A-Za-z]+|0\.\d\d|1\.00| ?\d|\n| ?."  # a word with the space before it, a coordinate, or one character


def make_tokenizer(texts: Iterable[str]) -> Any:
    """A fast tokenizer: one token per word of these texts, and one per printable ASCII character for all others.

    Args:
        texts: What the model shall read and say word by word.

    Returns:
        A ``transformers`` tokenizer; characters outside ASCII become ``<unk>``.

    Raises:
        MissingExtraError: If transformers is not installed (extra ``mllm``).
    """
    transformers = optional_import("transformers", extra="mllm")
    tokenizers = optional_import("tokenizers", extra="mllm")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated")
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)} - {""})
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    pieces = [(piece, 0.0) for piece in SPECIAL]
    pieces += [(character, -10.0) for character in characters]
    pieces += [(word, -1.0) for word in words if len(word) > 1]
    model = tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=False)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_processor(tokenizer: Any) -> Any:
    """The processor of the tiny model: 32 x 32 pictures, 64 image tokens.

    Raises:
        MissingExtraError: If transformers is not installed (extra ``mllm``).
    """
    transformers = optional_import("transformers", extra="mllm")
    images = transformers.CLIPImageProcessorPil(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        do_center_crop=False,
        image_mean=[0.25] * 3,
        image_std=[0.25] * 3,
    )
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )


def make_config(tokenizer: Any, *, width: int = 128, layers: int = 4) -> Any:
    """A ``LlavaConfig``: CLIP-type vision tower, projector of two layers, Llama decoder.

    Args:
        tokenizer: Gives the size of the vocabulary and the special tokens.
        width: Width of both towers; heads are 32 wide, feed-forward layers twice the width.
        layers: Layers of each tower; with 4 of width 128, about 1.3 million parameters.

    Raises:
        MissingExtraError: If transformers is not installed (extra ``mllm``).
    """
    transformers = optional_import("transformers", extra="mllm")
    shape = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
    }
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=IMAGE_SIZE, patch_size=PATCH, **shape),
        text_config=transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.05,  # the usual 0.02 is meant for widths of thousands
            pad_token_id=tokenizer.pad_token_id,
            **tokens,
            **shape,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        **tokens,
    )
