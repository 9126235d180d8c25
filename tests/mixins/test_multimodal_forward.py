"""Rehearsal in a LLaVA-like model: it enters behind the projector, and only the language model learns from it."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fcl import EmbeddingReplay, FederatedTrainer, TaskStream
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import Rehearsal
from lightning_fcl.mixins import MultimodalForwardMixin

IMAGE, CLASSES = 49, 3


class LitLlava(L.LightningModule):
    """A tiny LLaVA with random weights that names the event in one token."""

    def __init__(self):
        super().__init__()
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        vision = CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4)
        text = LlamaConfig(**sizes, vocab_size=50, num_hidden_layers=1, num_key_value_heads=2)
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
        self.model = LlavaForConditionalGeneration(config)

    def logits(self, batch):
        return self.model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"]).logits[:, -1]

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.class_logits(self.logits(batch)), batch["labels"])

    def validation_step(self, batch, batch_idx):
        right = self.class_logits(self.logits(batch)).argmax(1) == batch["labels"]
        self.log("val_acc", right.float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Net(MultimodalForwardMixin, LitLlava):
    answers = (5, 6, 7)


def example(label, draw):
    text = torch.randint(8, 48, (4,), generator=draw)
    ids = torch.cat([torch.tensor([1]), torch.full((4,), IMAGE), text])
    return {"input_ids": ids, "pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": label}


def data(count=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [example(n % CLASSES, draw) for n in range(count)]


def batch(**options):
    return torch.utils.data.default_collate(data(**options))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


def test_embeddings_and_the_way_in_make_the_forward_pass(net):
    posts = batch()
    visual, text = net.embeddings_of(posts)
    assert visual.shape == (8, 4, 16)
    assert text.shape == (8, 5, 16)
    torch.testing.assert_close(net.forward_embeddings(visual, text), net.class_logits(net.logits(posts)))


def test_vision_and_projector_get_no_gradient_and_the_language_model_does(net):
    net.rehearsal = Rehearsal(tuple(one.detach() for one in net.embeddings_of(batch())), torch.full((8, 3), 1 / 3), 1.0)
    net.loss_terms(None, None)["replay"].backward()
    net.rehearsal = None
    moved = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    net.zero_grad()
    assert not [name for name in moved if "vision_tower" in name or "multi_modal_projector" in name]
    assert any("language_model" in name for name in moved)


def test_a_federation_rehearses_in_it(tmp_path):
    torch.manual_seed(0)
    sets = [data(12, seed=task) for task in range(2)]
    stream = TaskStream.from_datasets(sets, sets, clients=2, batch_size=6)
    trainer = FederatedTrainer(
        rounds=1,
        clients_per_round=2,
        callbacks=EmbeddingReplay(budget=6),
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        run_dir=tmp_path,
    )
    report = trainer.fit(Net(), stream)
    assert report.accuracy.isfinite().all()
    assert "loss/replay" in (tmp_path / "metrics.csv").read_text()


def test_image_tokens_elsewhere_are_refused(net):
    posts = batch()
    posts["input_ids"] = posts["input_ids"].flip(1)
    with pytest.raises(MisconfigurationError, match="at position 1 in every text"):
        net.embeddings_of(posts)


def test_a_model_without_the_methods_is_refused():
    class Plain(MultimodalForwardMixin):
        model = None

    with pytest.raises(MisconfigurationError, match="`model_name` must name a model with `get_image_features`"):
        _ = Plain().multimodal_model
