import pytest
import torch
import transformers

from lightning_fcl.data import InstructionDataset, drawn_instructions, general_rows
from lightning_fcl.metrics import score_answers
from lightning_fcl.mllm import MultimodalInstructionModule
from lightning_fcl.models import TINY_LLAVA
from lightning_fcl.models.tiny_llava import IMAGE_TOKENS, make_config, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(["USER: ASSISTANT:", " ASSISTANT:", " red circle [0.25,0.38]"])


@pytest.mark.parametrize(
    "text",
    [
        "USER: <image>\nIs it red? ASSISTANT: red circle</s>",
        " [0.25,1.00]",
        "Zebra 37 %",
        "naïve",
        " ASSISTANT:red  circle",
    ],
)
def test_any_ascii_text_comes_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text.replace("ï", "<unk>")


def test_known_words_are_one_token(tokenizer):
    assert len(tokenizer(" red circle")["input_ids"]) == 2
    assert tokenizer.tokenize(" [0.25") == [" [", "0.25"]


def test_an_answer_is_tokenised_alike_alone_and_in_its_place(tokenizer):
    whole = tokenizer("USER: Is it? ASSISTANT: red</s>")["input_ids"]
    assert whole == [i for part in ("USER: Is it? ASSISTANT:", " red", "</s>") for i in tokenizer(part)["input_ids"]]


def test_the_configuration_is_that_of_a_llava(tokenizer):
    model = transformers.LlavaForConditionalGeneration(make_config(tokenizer))
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 3e6
    pictures = model.model.get_image_features(torch.zeros(1, 3, 32, 32)).pooler_output
    assert pictures[0].shape == (IMAGE_TOKENS, 128)


@pytest.fixture(scope="module")
def shipped():
    return MultimodalInstructionModule.from_pretrained(TINY_LLAVA, local_files_only=True, max_new_tokens=12)


def test_the_shipped_files_are_small_and_safe():
    sizes = {file.name: file.stat().st_size for file in TINY_LLAVA.iterdir()}
    assert sizes["model.safetensors"] < 3e6
    assert sum(sizes.values()) < 3.1e6
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in sizes)


def test_the_shipped_model_sees_what_it_was_taught_to_see(shipped):
    data = list(InstructionDataset(general_rows(96)))
    right = [row["conversations"][1]["value"] for row in data]
    assert score_answers("exact", shipped.answer(data), right) > 0.7
    blind = [row | {"image": row["image"] * 0} for row in data]
    assert score_answers("exact", shipped.answer(blind), right) < 0.35


def test_the_shipped_model_has_not_seen_the_stream(shipped):
    for task in ("parity", "odd", "tallest", "statement"):
        rows = drawn_instructions(task, 24, part="test")
        assert score_answers("exact", shipped.answer(rows), [row["answer"] for row in rows]) < 0.3
