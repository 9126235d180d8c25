"""A small generator of embeddings, one per client and task: what PPFR rehearses instead of data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_fcl.functional.embedding_generator import generator_losses

Mode = Literal["cvae", "literal"]


class EmbeddingGenerator(nn.Module):
    """Draws embeddings of known events from Gaussian codes.

    The first modality (visual tokens, or a classifier's features) comes from a two-layer decoder of latent and event
    code. The second one, if there is one (text), is a row of a table of prompt prototypes plus a small residual MLP.
    Both decoders work in units of the spread of the data around their event's mean, so that they start near it.

    A decoder gives one vector per example, which moves all positions of a token sequence alike around their mean: a
    sequence of 64 tokens of width 3,584 would else need a last layer of 59 million weights.

    Args:
        means: Mean embedding of each event per modality, shapes ``(E, *positions, d)``.
        spread: Standard deviation of the pooled embedding around its event's mean, per modality ``(d,)``.
        labels: Event of each row, shape ``(E,)``, int64: class numbers of the classifier.
        targets: Soft label of each event, shape ``(E, C)``.
        latent: Numbers in a Gaussian code.
        code: Numbers in an event's code.
        width: Hidden features of the visual decoder; the text's residual MLP has a quarter.
    """

    def __init__(
        self,
        means: Sequence[Tensor],
        spread: Sequence[Tensor],
        labels: Tensor,
        targets: Tensor,
        *,
        latent: int = 64,
        code: int = 16,
        width: int = 256,
    ) -> None:
        super().__init__()
        visual, *text = means
        events, inputs = len(labels), latent + code
        self.latent = latent
        self.register_buffer("labels", labels)
        self.register_buffer("targets", targets)
        self.event_code = nn.Embedding(events, code)
        self.decoder = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, visual.shape[-1]))
        self.register_buffer("visual_mean", visual)
        self.spread = nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in spread)
        self.prototypes = nn.Parameter(text[0].clone()) if text else None
        self.residual: nn.Sequential | None = None
        if text:
            last = nn.Linear(width // 4, text[0].shape[-1])
            nn.init.zeros_(last.weight)  # starts at the prototypes
            nn.init.zeros_(last.bias)
            self.residual = nn.Sequential(nn.Linear(inputs, width // 4), nn.GELU(), last)

    @override
    def forward(self, latent: Tensor, events: Tensor) -> tuple[Tensor, ...]:
        """Embeddings, one per modality, shapes ``(B, *positions, d)``.

        Args:
            latent: Gaussian codes, shape ``(B, latent)``.
            events: Rows of the tables, shape ``(B,)``, int64; ``labels[events]`` are the class numbers.
        """
        codes = torch.cat([latent, self.event_code(events)], dim=1)
        made = [_shift(self.visual_mean[events], self.decoder(codes) * self.spread[0])]  # type: ignore[index]
        if self.prototypes is not None and self.residual is not None:
            made.append(_shift(self.prototypes[events], self.residual(codes) * self.spread[1]))
        return tuple(made)

    def sample(self, counts: Sequence[int], rng: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Draw examples of each event.

        Args:
            counts: How many of each event.
            rng: On the CPU; the same state gives the same examples.

        Returns:
            Embeddings per modality, and soft labels ``(sum(counts), C)``.
        """
        events = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(self.targets.device)  # type: ignore[arg-type]
        latent = torch.randn(len(events), self.latent, generator=rng).to(self.targets.device)  # type: ignore[arg-type]
        with torch.no_grad():
            return self(latent, events), self.targets[events]  # type: ignore[index]

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "EmbeddingGenerator":
        """The generator whose ``state_dict()`` this is."""
        means = [state[name] for name in ("visual_mean", "prototypes") if name in state]
        width, inputs = state["decoder.0.weight"].shape
        code = state["event_code.weight"].shape[1]
        spread = [state[f"spread.{number}"] for number in range(len(means))]
        sizes = {"latent": inputs - code, "code": code, "width": width}
        with torch.random.fork_rng(devices=[]):
            generator = cls(means, spread, state["labels"], state["targets"], **sizes)
        generator.load_state_dict(dict(state))
        return generator.to(state["targets"].device)


def pooled(embedding: Tensor) -> Tensor:
    """Mean over positions, shape ``(B, d)``; features without positions come back as they are."""
    return embedding.flatten(1, -2).mean(1) if embedding.dim() > 2 else embedding


def fit_generator(
    generator: EmbeddingGenerator,
    real: Sequence[Tensor],
    events: Tensor,
    teacher: Tensor,
    classify: Callable[..., Tensor],
    rng: torch.Generator,
    *,
    mode: Mode = "cvae",
    epochs: int = 5,
    batch_size: int = 32,
    lr: float = 1e-3,
    weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    kl_weight: float = 0.1,
) -> list[float]:
    """Fit a generator to a client's embeddings of one task; the classifier stays as it is.

    Args:
        generator: Fitted in place.
        real: Real embeddings pooled over positions, per modality ``(N, d)``.
        events: Row of each in the generator's tables, shape ``(N,)``, int64.
        teacher: The classifier's probabilities on each, shape ``(N, C)``.
        classify: Embeddings, one argument per modality, to logits ``(B, C)``.
        rng: Draws codes and the order, on the CPU.
        mode: ``"literal"``: a code knows nothing of its example, so what is drawn falls together to the event's mean.
            ``"cvae"``: a small encoder, thrown away afterwards, finds each example's code.
        epochs: Passes over the data.
        batch_size: Examples per step.
        lr: Learning rate of AdamW.
        weights: Of reconstruction, alignment, teacher and label.
        kl_weight: Pull of the encoder's codes to the standard normal, per dimension of the embedding.

    Returns:
        Mean loss of each epoch.

    Raises:
        FloatingPointError: If the loss becomes NaN or infinite.
    """
    encoder = _Encoder(generator, real) if mode == "cvae" else None
    trained = [p for net in (generator, encoder) if net is not None for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    history = []
    for _ in range(epochs):
        total = 0.0
        for rows in torch.split(torch.randperm(len(events), generator=rng), batch_size):
            rows = rows.to(events.device)
            batch = [one[rows] for one in real]
            latent = torch.randn(len(rows), generator.latent, generator=rng).to(events.device)
            pull = latent.new_zeros(())
            if encoder is not None:
                latent, pull = encoder(batch, events[rows], latent)
            made = generator(latent, events[rows])
            mine, labels = [pooled(one) for one in made], generator.labels[events[rows]]  # type: ignore[index]
            losses = generator_losses(mine, batch, list(generator.spread), classify(*made), teacher[rows], labels)
            loss = kl_weight * pull + torch.stack([w * term for w, term in zip(weights, losses, strict=True)]).sum()
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                parameter.grad = gradient  # the classifier gets none
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        history.append(total / len(events))
    if not torch.isfinite(torch.tensor(history)).all():
        raise FloatingPointError(f"the embedding generator diverged (losses {history}). Lower its learning rate.")
    return history


class _Encoder(nn.Module):
    """Mean and log-variance of an example's code, from its pooled embeddings and its event's code."""

    def __init__(self, generator: EmbeddingGenerator, real: Sequence[Tensor]) -> None:
        super().__init__()
        self.generator = [generator]  # in a list: not a child
        sizes = sum(one.shape[1] for one in real) + generator.event_code.embedding_dim
        layers = nn.Linear(sizes, 64), nn.GELU(), nn.Linear(64, 2 * generator.latent)
        self.net = nn.Sequential(*layers).to(real[0].device)
        self.dimensions = sum(one.shape[1] for one in real)

    @override
    def forward(self, real: Sequence[Tensor], events: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        owner = self.generator[0]
        tables = [owner.visual_mean, owner.prototypes][: len(real)]
        away: list[Any] = [
            (one - pooled(table[events].detach())) / scale  # type: ignore[index]
            for one, table, scale in zip(real, tables, owner.spread, strict=True)
        ]
        mean, log_variance = self.net(torch.cat([*away, owner.event_code(events)], dim=1)).chunk(2, dim=1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return mean + (0.5 * log_variance).exp() * noise, divergence / self.dimensions


def _shift(positions: Tensor, by: Tensor) -> Tensor:
    """Move all positions of each example by its own vector."""
    return positions + by.reshape(len(by), *[1] * (positions.dim() - 2), by.shape[-1])
