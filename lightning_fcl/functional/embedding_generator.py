"""What a generator of embeddings is fitted by: likeness to real ones, agreement of modalities, a frozen teacher."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class GeneratorLosses(NamedTuple):
    r"""The four terms that a generator of embeddings is fitted by; scalars, means over the batch.

    Args:
        reconstruction: Squared distance to the real embeddings, added over the modalities.
        alignment: One minus the cosine between generated visual and text embedding; 0 where there is one modality.
        teacher: :math:`KL(p_{teacher} \| p)` in nats, on the generated embedding.
        label: Cross-entropy with the event, in nats.
    """

    reconstruction: Tensor
    alignment: Tensor
    teacher: Tensor
    label: Tensor


def generator_losses(
    generated: Sequence[Tensor],
    real: Sequence[Tensor],
    spread: Sequence[Tensor],
    logits: Tensor,
    teacher: Tensor,
    labels: Tensor,
) -> GeneratorLosses:
    """What is wrong with generated embeddings: far from the real ones, unlike each other, or taken for other events.

    Args:
        generated: One pooled embedding per modality, shape ``(B, d)``: visual and text, or the features alone.
        real: The embeddings they stand for, of the same shapes.
        spread: Unit of the distance per modality and dimension, shape ``(d,)``, above 0.
        logits: The frozen classifier's logits on the generated embeddings, shape ``(B, C)``.
        teacher: Its probabilities on the real ones, shape ``(B, C)``.
        labels: Events, shape ``(B,)``, int64.

    Returns:
        The four terms; gradients reach ``generated`` and ``logits``.

    Raises:
        ValueError: If the two modalities differ in width, or the shapes of ``generated`` and ``real``.

    Example:
        >>> x, even = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
        >>> one = torch.ones(2)
        >>> losses = generator_losses([x, x.flip(1)], [x, x], [one, one], even.log(), even, torch.tensor([0]))
        >>> [round(term.item(), 4) for term in losses]  # text off by (1, -1); orthogonal; as the teacher; log 2
        [1.0, 1.0, 0.0, 0.6931]

    Source: FedCMM (arXiv 2607.12112), sec. IV-C: "embedding reconstruction, image-text alignment, teacher KL, and
    cross-entropy losses".

    Deviation: the paper names the terms only. Squared distances are means over dimensions, in units of ``spread``, so
    that the weights of the terms mean the same for every model.
    """
    if any(mine.shape != other.shape for mine, other in zip(generated, real, strict=True)):
        raise ValueError("`generated` and `real` must have the same shapes, got different ones.")
    if len({one.shape for one in generated}) > 1:
        raise ValueError(f"`generated` must be of one width, got {[tuple(one.shape) for one in generated]}.")
    triples = zip(generated, real, spread, strict=True)
    distance = torch.stack([((mine - other) / unit).square().mean() for mine, other, unit in triples]).sum()
    apart = 1 - F.cosine_similarity(generated[0], generated[-1], dim=1).mean()
    apart = apart if len(generated) > 1 else torch.zeros_like(apart)
    log_probs = F.log_softmax(logits, dim=1)
    divergence = F.kl_div(log_probs, teacher.to(log_probs.dtype), reduction="batchmean")
    return GeneratorLosses(distance, apart, divergence, F.nll_loss(log_probs, labels))
