import numpy as np
import pytest
import torch

from lightning_fcl.exceptions import DatasetError
from lightning_fcl.mllm import InstructionCollator
from lightning_fcl.models.tiny_llava import make_processor, make_tokenizer
from tests.mllm.test_families import row


@pytest.fixture(scope="module")
def processor():
    return make_processor(make_tokenizer(["USER: ASSISTANT:", " ASSISTANT:", " red yes no Is it red?"]))


def counted(processor, batch, number=0):
    return processor.tokenizer.decode([token for token in batch["labels"][number].tolist() if token != -100])


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_answers_count(processor, side):
    collator = InstructionCollator(processor, padding_side=side)
    batch = collator([row("Is it red?", "yes"), row("Tell me: is it red, or is it not?", "no, it is a zebra")])
    assert counted(processor, batch) == " yes</s>"
    assert counted(processor, batch, 1) == " no, it is a zebra</s>"
    padded = batch["attention_mask"] == 0
    assert padded[0].any()
    assert padded[0, 0 if side == "left" else -1]
    assert (batch["labels"][padded] == -100).all()


def test_every_answer_of_a_conversation_counts(processor):
    talk = row("Is it red?", "yes")
    talk["conversations"] += [{"from": "human", "value": "Is it red? no"}, {"from": "gpt", "value": "red"}]
    batch = InstructionCollator(processor)([talk])
    assert counted(processor, batch) == " yes</s> red</s>"
    assert batch["prompts"] == ["Is it red?"]
    assert batch["answers"] == ["yes"]
    assert batch["metrics"] == ["exact"]


def test_prompts_end_where_the_answer_starts_and_do_not_depend_on_it(processor):
    collator = InstructionCollator(processor)
    prompts = collator.prompts([row("Is it red?", "yes"), row("Is it?", "no")])
    assert prompts["attention_mask"][1, 0] == 0
    text = processor.tokenizer.batch_decode(prompts["input_ids"], skip_special_tokens=False)
    assert [one.endswith(" ASSISTANT:") for one in text] == [True, True]
    assert torch.equal(
        prompts["input_ids"], collator.prompts([row("Is it red?", "no"), row("Is it?", "yes")])["input_ids"]
    )
    assert (prompts["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<image>")).sum(dim=1).tolist() == [
        64,
        64,
    ]


def test_nothing_is_cut(processor):
    with pytest.raises(DatasetError, match=r"`max_length` must be at least \d+ for this batch.*got 66"):
        InstructionCollator(processor, max_length=66)([row("Is it red?", "yes")])


def test_a_template_that_does_not_continue_its_prompt_is_refused(processor):
    collator = InstructionCollator(processor)
    template = processor.chat_template
    processor.chat_template = template.replace("ASSISTANT: {{", "BOT: {{")
    try:
        with pytest.raises(DatasetError, match="must continue its own prompt"):
            collator([row("Is it red?", "yes")])
    finally:
        processor.chat_template = template
    with pytest.raises(ValueError, match="`padding_side` must be 'left' or 'right', got 'top'"):
        InstructionCollator(processor, padding_side="top")


def test_pixels_are_those_of_the_picture(processor):
    one = row("Is it red?", "yes", height=32, width=32)
    one["image"] = np.full((32, 32, 3), 128, dtype=np.uint8)
    pixels = InstructionCollator(processor)([one])["pixel_values"]
    torch.testing.assert_close(pixels, torch.full((1, 3, 32, 32), (128 / 255 - 0.25) / 0.25))
