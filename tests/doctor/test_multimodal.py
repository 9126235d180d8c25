"""Tokens of image-and-text models, and large models from their configuration alone."""

import pytest
import torch
import transformers

from lightning_fcl.data import fcit_stream
from lightning_fcl.doctor import Diagnosis, check_tokens, diagnose, estimate
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.mllm import LoRA, MultimodalInstructionModule
from lightning_fcl.models import TINY_LLAVA
from tests.helpers.families import FAMILIES, make_family
from tests.helpers.toy import toy_trainer
from tests.mllm.test_families import ROWS


def checked(model, processor):
    found = Diagnosis()
    check_tokens(found, model, processor, ROWS[0])
    return [(finding.level, finding.text) for finding in found.findings]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_fits_its_own_processor(kind):
    ((level, text),) = checked(*make_family(kind))
    assert level == "ok", text


def test_another_image_token():
    model, processor = make_family("llava")
    model.config.image_token_id = 7
    ((level, text),) = checked(model, processor)
    assert level == "error"
    assert "has the id 4 in the processor and 7 in the model's config" in text


def test_another_number_of_image_tokens():
    model, processor = make_family("llava")
    processor.num_additional_image_tokens = 0
    ((level, text),) = checked(model, processor)
    assert level == "error"
    assert "the text has 3 image tokens and the vision tower gives 4 vectors" in text


def test_no_pad_token_or_that_of_images():
    model, processor = make_family("llava")
    processor.tokenizer.pad_token = "<image>"
    assert "the pad token is the image token" in checked(model, processor)[0][1]
    processor.tokenizer.pad_token = None
    assert "has no pad token" in checked(model, processor)[0][1]


def test_too_small_a_vocabulary_and_no_template():
    model, processor = make_family("llava")
    model.resize_token_embeddings(100)
    assert "knows 121 tokens and the model has embeddings for 100" in checked(model, processor)[0][1]
    processor.chat_template = processor.tokenizer.chat_template = None
    assert "there is no chat template" in checked(model, processor)[0][1]


@pytest.fixture(scope="module")
def tiny():
    stream = fcit_stream("hom", "task", tasks=["tallest", "parity"], clients=3, train_size=12, test_size=4)
    return MultimodalInstructionModule.from_pretrained(TINY_LLAVA, max_new_tokens=4), stream


def test_the_tiny_llava_is_well(tiny, tmp_path):
    module, stream = tiny
    found = diagnose(toy_trainer(tmp_path / "run", rounds=2, clients_per_round=2), module, stream)
    assert found.ok, found
    subjects = {f.subject: f.text for f in found.findings if f.level == "ok"}
    # in the first step LoRA's second factor is zero, and so is the gradient of the first
    assert subjects["gradients"] == "all 24 trainable parameters got finite ones"
    assert "processor" in subjects
    assert found.numbers["round_up"] == found.numbers["bytes_travels"] == 4 * 36_864
    assert found.numbers["memory_optimizer"] == 2 * 4 * 36_864 + 4 * 24


def test_a_layer_of_the_projector_that_is_trained_for_nothing(tiny, tmp_path):
    module, stream = tiny
    module = type(module)(module.model.get_base_model(), module.processor, lora=None, max_new_tokens=2)
    tower = module.model.model.vision_tower
    for parameter in tower.parameters():  # LLaVA leaves out the last layer's output, or reads an earlier one
        parameter.requires_grad_(True)
    found = diagnose(toy_trainer(tmp_path / "run"), module, stream)
    (dead,) = [f.text for f in found.findings if f.level == "warning"]
    assert "post_layernorm" in dead
    tower.requires_grad_(False)


# -- from config.json --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory):
    """The configuration of LLaVA-1.5-7B: the defaults of transformers."""
    folder = tmp_path_factory.mktemp("llava")
    transformers.LlavaConfig().save_pretrained(folder)
    return folder


def test_seven_billion_parameters_from_config_json(seven_billion):
    found = estimate(seven_billion, devices=8)
    lora = 32 * 3 * 8 * (4096 + 11008)  # layers, projections, rank, in + out
    assert found.numbers["trained"] == lora
    assert found.numbers["parameters"] == pytest.approx(7.06e9 + lora, rel=1e-2)
    frozen, trained = 2 * (found.numbers["parameters"] - lora), 4 * lora
    assert found.numbers["bytes_weights"] == frozen + trained
    vectors = 11 * trained + 2 * trained  # five clients: three vectors, a slab of eight, one float64 node
    assert found.numbers["memory_one_process"] == frozen + trained + 3 * trained + vectors
    assert found.numbers["memory_zero_2"] == frozen + trained + trained // 8 + 12 * lora // 8 + vectors
    assert found.numbers["memory_zero_3"] == (frozen + trained + trained + 12 * lora) // 8 + vectors
    assert found.numbers["bytes_up"] == 100 * 5 * trained
    assert found.findings[0].level == "warning"  # there are no processor's files
    assert found.ok


def test_what_the_meta_device_says_is_what_the_model_is(tiny):
    found = estimate(TINY_LLAVA, dtype="float32", lora=LoRA(rank=8), train_projector=True)
    module = MultimodalInstructionModule.from_pretrained(TINY_LLAVA, lora=LoRA(rank=8), train_projector=True)
    weights = list(module.parameters())
    assert found.numbers["parameters"] == sum(p.numel() for p in weights)
    assert found.numbers["trained"] == sum(p.numel() for p in weights if p.requires_grad)
    assert found.numbers["bytes_weights"] == sum(p.numel() * p.element_size() for p in weights)
    assert [f.level for f in found.findings] == ["ok"]
    assert {p.device for p in weights} == {torch.device("cpu")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float33"}, "`dtype` must name a dtype of torch"),
        ({"devices": 0}, "`devices` must be at least 1, got 0"),
        ({"link_mbit": [0]}, "`link_mbit` must hold positive speeds"),
        ({"lora": LoRA(target="nothing")}, "`target` must match the full name of a linear layer"),
    ],
)
def test_what_cannot_be_estimated(options, message):
    with pytest.raises(MisconfigurationError, match=message):
        estimate(TINY_LLAVA, **options)


def test_no_configuration(tmp_path):
    with pytest.raises(MisconfigurationError, match="`path` must be a folder with a model"):
        estimate(tmp_path)
