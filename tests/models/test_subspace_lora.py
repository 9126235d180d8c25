"""Layers with subspaces, their encoders, and adapters that PEFT opens."""

import copy
import json

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_fcl.aggregators import SubspaceRouter
from lightning_fcl.callbacks import SaveSubspaces
from lightning_fcl.exceptions import CheckpointError, MisconfigurationError
from lightning_fcl.mixins import SubspaceRoutingMixin
from lightning_fcl.models import (
    ImageMean,
    PromptEmbeddings,
    SubspaceLinear,
    TextEncoder,
    add_subspaces,
    load_subspaces,
    save_subspaces,
    subspace_layers,
)
from tests.helpers.subspaces import make_net, subspace_stream
from tests.helpers.toy import toy_trainer

transformers = pytest.importorskip("transformers")
FFN = r"re:layers.*(gate|up|down)_proj$"


def tiny_llama(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


class LitLlama(L.LightningModule):
    def __init__(self, seed=0, rank=2):
        super().__init__()
        self.model = tiny_llama(seed)
        add_subspaces(self.model, FFN, rank=rank, scaling=2.0)

    def logits(self, batch):
        return self.model(input_ids=batch["input_ids"]).logits


class Llama(SubspaceRoutingMixin, LitLlama):
    """With the language model's own embeddings."""


def trained(module, slots=3, tokens=True):
    """The module with random subspaces installed."""
    generator = torch.Generator().manual_seed(5)
    names = [f"{name}.lora_{factor}" for name in subspace_layers(module) for factor in "AB"]
    shapes = {name: dict(module.named_parameters())[name].shape for name in names}
    banks = [{n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()} for _ in range(slots)]
    module.install_subspaces(banks, torch.randn(slots, 16, generator=generator) if tokens else None)
    return module, banks


BATCH = {
    "input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]]),
    "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]),
}


# -- the layer --------------------------------------------------------------------------------------------------------


def test_the_forward_pass_of_training_and_of_evaluation():
    layer = SubspaceLinear(nn.Linear(5, 4), rank=2, scaling=2.0)
    x = torch.randn(3, 6, 5)
    assert torch.equal(layer(x), layer.base(x))  # B = 0
    nn.init.normal_(layer.lora_B)
    own = 2.0 * x @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(layer(x), layer.base(x) + own)
    a, b = [torch.randn(2, 5) for _ in range(3)], [torch.randn(4, 2) for _ in range(3)]
    layer.set_bank(a, b)
    factors = torch.rand(3, 3)
    parts = torch.stack([2.0 * x @ down.T @ up.T for down, up in zip(a, b, strict=True)])
    mixed = torch.einsum("bt,tblo->blo", factors, parts)
    layer.activate(factors)
    torch.testing.assert_close(layer(x), layer.base(x) + mixed)
    torch.testing.assert_close(
        layer(x.flatten(0, 1)), (layer.base(x) + mixed).flatten(0, 1)
    )  # rows of one sample follow
    layer.activate(factors, active=True)
    torch.testing.assert_close(layer(x), layer.base(x) + mixed + own)
    layer.activate(None, active=True)
    torch.testing.assert_close(layer(x), layer.base(x) + own)
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert "bank" not in " ".join(layer.state_dict())


def test_the_bank_follows_the_layer():
    layer = SubspaceLinear(nn.Linear(5, 4), rank=2)
    layer.set_bank([torch.randn(2, 5)], [torch.randn(4, 2)])
    layer.to(torch.float64)
    assert {t.dtype for t in layer.bank} == {torch.float64}
    assert layer.bank[1].transpose(0, 1).is_contiguous()
    assert layer.weight is layer.base.weight
    assert layer.bias is layer.base.bias
    twin = copy.deepcopy(layer)
    layer.set_bank([], [])
    assert layer.bank is None
    assert len(twin.bank[0]) == 1


def test_bad_banks_and_factors():
    layer = SubspaceLinear(nn.Linear(5, 4), rank=2)
    with pytest.raises(ValueError, match=r"must have shape \(2, 5\)"):
        layer.set_bank([torch.randn(3, 5)], [torch.randn(4, 2)])
    layer.set_bank([torch.randn(2, 5)], [torch.randn(4, 2)])
    with pytest.raises(ValueError, match="`factors` must have shape"):
        layer.activate(torch.ones(1, 2))
    layer.activate(torch.ones(2, 1))
    with pytest.raises(ValueError, match="2 samples were routed"):
        layer(torch.randn(3, 5))
    with pytest.raises(MisconfigurationError, match="must match a linear layer"):
        add_subspaces(nn.Sequential(nn.Linear(2, 2)), "nothing")


def test_size_of_a_slot():
    """C-12: 120,832 a pair of LLaVA-1.5-7B's FFN, 11,599,872 in all; C-11: the scale is 128 / 64 = 64 / 32 = 2."""
    with torch.device("meta"):
        sizes = [
            sum(
                p.numel() for p in SubspaceLinear(nn.Linear(*shape, bias=False), rank=8).parameters() if p.requires_grad
            )
            for shape in ((4096, 11008), (4096, 11008), (11008, 4096))
        ]
    assert sizes == [120_832] * 3
    assert 32 * sum(sizes) == 11_599_872
    assert SubspaceLinear(nn.Linear(1, 1)).scaling == 128 / 64 == 64 / 32


# -- encoders ---------------------------------------------------------------------------------------------------------


def test_own_embeddings_ignore_answers_padding_and_pictures():
    module = Llama()
    weight = module.model.get_input_embeddings().weight
    labels = torch.tensor([[-100, -100, 5, 6], [-100, -100, 9, -100]])
    found = PromptEmbeddings(module.model.get_input_embeddings(), ignore=(3,))({**BATCH, "labels": labels})
    torch.testing.assert_close(found[0], weight[4] - weight.mean(0))
    torch.testing.assert_close(found[1], weight[[7, 8]].mean(0) - weight.mean(0))
    prompts = {key: value[:, :2] for key, value in BATCH.items()}  # what an evaluation sees
    torch.testing.assert_close(module.identity_features(prompts), module.identity_features({**BATCH, "labels": labels}))
    empty = module.identity_features({**BATCH, "labels": torch.zeros_like(labels)})
    assert not empty.any()


def test_a_clip_text_tower(tmp_path):
    config = transformers.CLIPTextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=2
    )
    tower = transformers.CLIPTextModel(config)

    class Words:
        def __call__(self, texts, **options):
            ids = torch.tensor([[1, 5 + len(text), 2] for text in texts])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "other": ids}

    encoder = TextEncoder(tower, Words())
    batch = {"prompts": ["read", "count them"]}
    found = encoder(batch)
    assert found.shape == (2, 16)
    ids = torch.tensor([[1, 9, 2], [1, 15, 2]])
    torch.testing.assert_close(found, tower(input_ids=ids).pooler_output)  # before the projection, not normalised
    mean = TextEncoder(tower, Words(), pooling="mean", prompts=lambda batch: batch["prompts"])(batch)
    torch.testing.assert_close(mean, tower(input_ids=ids).last_hidden_state.mean(1))
    assert not any(p.requires_grad for p in encoder.parameters())
    with pytest.raises(MisconfigurationError, match="`pooling`"):
        TextEncoder(tower, Words(), pooling="max")
    module = Llama(routing_encoder=encoder)
    torch.testing.assert_close(module.identity_features(batch), found)


def test_pictures_and_both():
    tower = nn.Conv2d(3, 6, 2, stride=2)

    class Seeing(Llama):
        def __init__(self, **options):
            super().__init__(**options)
            self.vision_tower = tower

    pixels = torch.randn(2, 3, 4, 4)
    batch = {**BATCH, "pixel_values": pixels}
    encoder = ImageMean(tower)
    both = Seeing(routing_source="both", routing_image_encoder=encoder).identity_features(batch)
    image = Seeing(routing_source="image").identity_features(batch)
    torch.testing.assert_close(image, encoder(batch).detach())
    text = Llama().identity_features(batch)
    half = nn.functional.cosine_similarity(text[0], text[1], dim=0) + nn.functional.cosine_similarity(
        image[0], image[1], dim=0
    )
    torch.testing.assert_close(nn.functional.cosine_similarity(both[0], both[1], dim=0), half / 2)
    with pytest.raises(MisconfigurationError, match="has no `vision_tower`"):
        Llama(routing_source="image").identity_features(batch)


@pytest.mark.parametrize(
    "arguments", [{"routing_activation": "max"}, {"routing_source": "sound"}, {"routing_temperature": 0.0}]
)
def test_bad_mixin_arguments(arguments):
    with pytest.raises(MisconfigurationError, match=f"`{next(iter(arguments))}`"):
        Llama(**arguments)


def test_without_a_language_model():
    class Net(SubspaceRoutingMixin):
        pass

    with pytest.raises(MisconfigurationError, match="`routing_encoder` must be given"):
        Net().identity_features(BATCH)
    with pytest.raises(ValueError, match="one row per subspace"):
        Net().install_subspaces([], torch.zeros(1, 3))


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers 5 for it
def test_each_subspace_is_an_adapter_that_peft_opens_with_the_same_logits(tmp_path):
    peft = pytest.importorskip("peft")
    module, _ = trained(Llama())
    paths = save_subspaces(module, tmp_path)
    assert [path.name for path in paths] == ["subspace_00", "subspace_01", "subspace_02"]
    for slot, path in enumerate(paths):
        opened = peft.PeftModel.from_pretrained(tiny_llama(), str(path)).eval()
        for layer in subspace_layers(module).values():
            layer.activate(nn.functional.one_hot(torch.tensor([slot]), 3).float())
        with torch.no_grad():
            torch.testing.assert_close(module.logits(BATCH), opened(input_ids=BATCH["input_ids"]).logits)
    config = json.loads((paths[0] / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)


def test_loading_restores_the_router(tmp_path):
    module, banks = trained(Llama())
    save_subspaces(module, tmp_path)
    other = Llama()
    load_subspaces(other, tmp_path)
    with module.routed(BATCH) as factors, other.routed(BATCH) as again, torch.no_grad():
        assert torch.equal(factors, again)
        assert torch.equal(module.logits(BATCH), other.logits(BATCH))
    with other.routed(BATCH), torch.no_grad():
        routed = other.logits(BATCH)
    assert not torch.allclose(routed, other.logits(BATCH))
    assert torch.equal(load_file(tmp_path / "subspace_01" / "adapter_model.safetensors")[PEFT_NAME], banks[1][OUR_NAME])


OUR_NAME = "model.model.layers.0.mlp.gate_proj.lora_A"
PEFT_NAME = "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"


def test_adapters_of_another_base_layer_or_encoder_are_refused(tmp_path):
    module, _ = trained(Llama())
    save_subspaces(module, tmp_path)
    with pytest.raises(CheckpointError, match="another base model"):
        load_subspaces(Llama(seed=1), tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this module's subspace layers"):
        load_subspaces(Llama(rank=3), tmp_path)
    with pytest.raises(CheckpointError, match="made from text by its own features"):
        load_subspaces(Llama(routing_encoder=lambda batch: batch), tmp_path)
    with pytest.raises(FileNotFoundError):
        load_subspaces(Llama(), tmp_path / "nowhere")

    class Attention(SubspaceRoutingMixin):
        def __init__(self):
            super().__init__()
            self.model = tiny_llama()
            add_subspaces(self.model, "*q_proj", rank=2)

    with pytest.raises(CheckpointError, match="other layers"):
        load_subspaces(Attention(), tmp_path)
    with pytest.raises(MisconfigurationError, match="must have subspaces installed"):
        save_subspaces(Llama(), tmp_path)


def test_tokens_of_another_encoder_are_refused_at_the_first_batch():
    module, banks = trained(Llama())
    module.install_subspaces(banks, torch.randn(3, 7))
    with pytest.raises(ValueError, match="Tokens of different encoders"), module.routed(BATCH):
        pass


def test_a_run_saves_its_adapters(tmp_path):
    trainer = toy_trainer(
        tmp_path, rounds=1, aggregator=SubspaceRouter(), server_callbacks=[SaveSubspaces()], fast_dev_run=False
    )
    net = make_net()
    trainer.fit(net, subspace_stream(tasks=2, examples=40))
    folders = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("adapters/*/*/"))
    assert folders == [
        "adapters/task_00/subspace_00",
        "adapters/task_01/subspace_00",
        "adapters/task_01/subspace_01",
    ]
    other = make_net()
    load_subspaces(other, tmp_path / "adapters" / "task_01")
    for name, layer in subspace_layers(net).items():
        assert all(map(torch.equal, layer.bank, subspace_layers(other)[name].bank))
    assert torch.equal(other.subspace_tokens, net.subspace_tokens)
