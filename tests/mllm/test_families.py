import numpy as np
import pytest
import torch

from lightning_fcl.mllm import MultimodalInstructionModule
from tests.helpers.families import FAMILIES, make_family


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)


def row(question, answer, height=28, width=28):
    turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
    return {"image": picture(height, width), "conversations": turns}


ROWS = [row("Is it red?", "yes"), row("Is it very very blue?", "no blue", height=60, width=40)]


@pytest.fixture(scope="module", params=FAMILIES)
def module(request):
    torch.manual_seed(0)
    return MultimodalInstructionModule(*make_family(request.param), max_new_tokens=2)


def test_pictures_of_any_size_train_and_are_answered(module):
    batch = module.on_before_batch_transfer(ROWS, 0)
    counted = [[token for token in labels if token != -100] for labels in batch["labels"].tolist()]
    assert module.processor.tokenizer.batch_decode(counted) == [" yes</s>", " no blue</s>"]
    loss = module.model(**{k: v for k, v in batch.items() if torch.is_tensor(v)}).loss
    loss.backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved  # B is zero at first, so only its gradients are not
    assert all("lora_B" in name and "vision" not in name for name in moved)
    module.zero_grad()
    answers = module.answer(ROWS)
    assert answers == [module.answer([one])[0] for one in ROWS]


def test_the_padding_side_changes_no_logit(module):
    sides = {}
    for side in ("left", "right"):
        module.collator.padding_side = side
        batch = module.on_before_batch_transfer(ROWS, 0)
        with torch.no_grad():
            sides[side] = module(batch)[batch["labels"] != -100]
    torch.testing.assert_close(sides["left"], sides["right"], atol=1e-4, rtol=1e-4)
