"""A small classifier of picture and text, built as a multimodal language model is: encoder, projector, joint trunk."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightning_fcl.mixins.embedding_forward import EmbeddingForwardMixin

EventBatch = tuple[Tensor, Tensor, Tensor]
"""Pictures ``[B, 3, H, W]``, tokens ``[B, L]`` and labels ``[B]``."""


class LowRankLinear(nn.Linear):
    """A frozen linear layer plus a trainable product of two thin matrices (LoRA), which starts at zero.

    Args:
        in_features: Inputs.
        out_features: Outputs.
        rank: Inner size of the product; 0 trains the layer itself.
    """

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__(in_features, out_features)
        self.rank = rank
        if rank:
            self.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(rank, in_features) / in_features**0.5)
            self.up = nn.Parameter(torch.zeros(out_features, rank))

    @override
    def forward(self, input: Tensor) -> Tensor:
        """What ``nn.Linear`` gives, plus the adapter's part."""
        out = super().forward(input)
        return out + F.linear(F.linear(input, self.down), self.up) if self.rank else out


class TwoTower(nn.Module):
    """Vision tower, projector and language part; picture and text meet in the trunk of the language part only.

    The children ``vision``, ``projector`` and ``language`` hold all trainable parameters, so they are the groups that
    methods which tell modalities apart ask for. With adapters, the dense weights stay as they were drawn.

    Args:
        num_classes: Number of logits.
        image_size: Height and width of the pictures in pixels, a multiple of ``patch``.
        patch: Height and width of a patch.
        vocabulary: Number of tokens; 0 pads.
        width: Width of all embeddings.
        rank: Of the adapters of all linear layers but the last; 0 trains everything.

    Example:
        >>> TwoTower()(torch.zeros(2, 3, 16, 16), torch.ones(2, 16, dtype=torch.long)).shape
        torch.Size([2, 7])
    """

    def __init__(
        self,
        num_classes: int = 7,
        image_size: int = 16,
        patch: int = 4,
        vocabulary: int = 512,
        width: int = 64,
        rank: int = 8,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"`image_size` must be a multiple of `patch` ({patch}), got {image_size}.")
        self.vision = nn.Sequential(
            nn.PixelUnshuffle(patch),
            nn.Flatten(2),
            _Transpose(),  # [B, patches, pixels of a patch]
            LowRankLinear(3 * patch**2, 2 * width, rank),
            nn.GELU(),
            LowRankLinear(2 * width, width, rank),
            nn.GELU(),
        )
        self.projector = LowRankLinear(width, width, rank)
        self.language = nn.ModuleDict(
            {
                "embed": nn.Embedding(vocabulary, width, padding_idx=0).requires_grad_(not rank),
                "read": nn.Sequential(LowRankLinear(width, 2 * width, rank), nn.GELU()),
                "pool": LowRankLinear(2 * width, width, rank),
                "trunk": nn.Sequential(LowRankLinear(2 * width, 2 * width, rank), nn.GELU()),
                "head": nn.Linear(2 * width, num_classes),
            }
        )

    def embed(self, pictures: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the picture, behind the projector, and of the text, each of shape ``(B, width)``."""
        visual = self.projector(self.vision(pictures).mean(1))
        words = self.language["read"](self.language["embed"](tokens)) * (tokens > 0).unsqueeze(2)
        return visual, self.language["pool"](words.amax(1))

    def classify(self, visual: Tensor, textual: Tensor) -> Tensor:
        """Logits of embeddings, shape ``(B, num_classes)``."""
        logits: Tensor = self.language["head"](self.language["trunk"](torch.cat([visual, textual], dim=1)))
        return logits

    @override
    def forward(self, pictures: Tensor, tokens: Tensor) -> Tensor:
        """Logits, shape ``(B, num_classes)``."""
        return self.classify(*self.embed(pictures, tokens))


def pretrain_towers(net: TwoTower, posts: TensorDataset, *, epochs: int = 6, lr: float = 3e-3, seed: int = 0) -> float:
    """Teach picture and text embedding to tell what is to be told, then freeze the dense weights that have adapters.

    The head of each cue is thrown away; of events the network learns nothing. It stands for the pretraining of a large
    model, after which fine-tuning moves little.

    Args:
        net: Trained in place; its trunk and its head stay as they are.
        posts: Pictures, tokens, and a class number for each of the two, as :func:`~lightning_fcl.data.cue_posts` gives.
        epochs: Passes over the posts.
        lr: Learning rate of AdamW.
        seed: Seeds heads and order; torch's global generator stays where it was.

    Returns:
        Loss of the last epoch, both cues added, in nats.
    """
    frozen = [p for p in net.parameters() if not p.requires_grad]
    pictures, tokens, *cues = posts.tensors
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        heads = nn.ModuleList(nn.Linear(net.projector.out_features, int(cue.max()) + 1) for cue in cues)
        towers = [p for name, p in net.named_parameters() if "trunk" not in name and "head" not in name]
        dense = [p for p in towers if not any(p is q for q in _adapters(net))]
        optimizer = torch.optim.AdamW([*(p.requires_grad_() for p in dense), *heads.parameters()], lr=lr)
        total = 0.0
        for _ in range(epochs):
            total = 0.0
            for rows in torch.split(torch.randperm(len(tokens)), 32):
                embeddings = net.embed(pictures[rows], tokens[rows])
                triples = zip(heads, embeddings, cues, strict=True)
                loss = torch.stack([F.cross_entropy(head(one), cue[rows]) for head, one, cue in triples]).sum()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += float(loss.detach()) * len(rows) / len(tokens)
    for p in net.parameters():
        p.grad = None
    for p in frozen:
        p.requires_grad_(False)
    return total


def _adapters(net: nn.Module) -> list[nn.Parameter]:
    layers = [layer for layer in net.modules() if isinstance(layer, LowRankLinear) and layer.rank]
    return [p for layer in layers for p in (layer.down, layer.up)]


class _Transpose(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class LitTwoTower(L.LightningModule):
    """Cross-entropy training of a :class:`TwoTower` on batches of pictures, tokens and labels.

    Logs ``val_loss`` (nats) and ``val_acc`` (share of right answers).

    Args:
        net: The network.
        lr: Learning rate of AdamW.
        weight_decay: Decoupled decay.
    """

    def __init__(self, net: TwoTower, lr: float = 5e-3, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        self.net = net
        self.lr, self.weight_decay = lr, weight_decay

    @override
    def forward(self, pictures: Tensor, tokens: Tensor) -> Tensor:
        """Logits, shape ``(B, C)``."""
        logits: Tensor = self.net(pictures, tokens)
        return logits

    @override
    def training_step(self, batch: EventBatch, batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch, in nats."""
        return F.cross_entropy(self(batch[0], batch[1]), batch[2])

    @override
    def validation_step(self, batch: EventBatch, batch_idx: int) -> None:
        """Log loss and accuracy of the batch."""
        logits = self(batch[0], batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[2]), batch_size=len(batch[2]))
        self.log("val_acc", (logits.argmax(1) == batch[2]).float().mean(), batch_size=len(batch[2]))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what is trainable."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.lr, weight_decay=self.weight_decay)


class EventClassifier(EmbeddingForwardMixin, LitTwoTower):
    """A :class:`LitTwoTower` with a way in for rehearsal: its embeddings are the projected picture and the text."""

    feature_module = "net.language.head"

    @override
    def inputs_of(self, batch: EventBatch) -> dict[str, Tensor]:
        return {"pictures": batch[0], "tokens": batch[1]}

    @override
    def targets_of(self, batch: EventBatch) -> Tensor:
        return batch[2]

    @override
    def embeddings_of(self, batch: EventBatch) -> tuple[Tensor, ...]:
        return self.net.embed(batch[0], batch[1])

    @override
    def forward_embeddings(self, *embeddings: Tensor) -> Tensor:
        return self.net.classify(*embeddings)


def event_log_likelihood(module: nn.Module, batch: Any) -> Tensor:
    """``log p(y|x)`` of each post, shape ``(B,)``, in nats: what EWC and its relatives ask for.

    Args:
        module: An :class:`EventClassifier` or a :class:`TwoTower`.
        batch: Pictures, tokens and labels.
    """
    pictures, tokens, labels = batch
    return -F.cross_entropy(module(pictures, tokens), labels, reduction="none")
