"""Identity tokens: fingerprints of what a client's instructions ask for, and how alike two of them are."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ThresholdProposal(NamedTuple):
    """A threshold between the cosines inside of a task and those between tasks.

    Args:
        threshold: Midway between the two.
        within: Smallest cosine of two tokens of one task; NaN if no task has two.
        between: Largest cosine of two tokens of different tasks.
    """

    threshold: float
    within: float
    between: float


def identity_token(features: Tensor) -> Tensor:
    r"""Fingerprint of a set of instructions: the plain mean of their features.

    .. math:: \mu_k = \frac{1}{N_k} \sum_{x \in D_k} e(x)

    Args:
        features: One row per instruction, shape ``[N, d]``, any float dtype; not normalised.

    Returns:
        Shape ``[d]``, float32; summed in float64.

    Raises:
        ValueError: If there is no row, or one holds NaN or infinite values.

    Example:
        >>> identity_token(torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 3.0]]))
        tensor([2., 2.])

    Source: Guo et al., "Federated Continual Instruction Tuning", ICCV 2025, dynamic knowledge organisation
    (https://arxiv.org/abs/2503.12897).

    Deviation: None.
    """
    if features.dim() != 2 or not len(features):
        raise ValueError(f"`features` must have shape [N, d] with N >= 1, got {tuple(features.shape)}.")
    mean = features.detach().double().mean(0)
    if not torch.isfinite(mean).all():
        raise ValueError("`features` must be finite, got NaN or infinite values. Does the encoder overflow?")
    return mean.float()


def update_token(token: Tensor, count: float, new_token: Tensor, new_count: float) -> tuple[Tensor, float]:
    r"""Running mean of a subspace's token.

    .. math:: g \leftarrow \frac{n g + m \mu}{n + m}, \qquad n \leftarrow n + m

    Args:
        token: Token so far, shape ``[d]``, float32.
        count: Examples behind it; 0 for a subspace that was just opened.
        new_token: Token of the examples to add, shape ``[d]``.
        new_count: Their number, positive.

    Returns:
        The new token in float32 (formed in float64) and the new count.

    Raises:
        ValueError: If the tokens' sizes differ (another encoder), or ``new_count`` is not positive.

    Example:
        >>> update_token(torch.tensor([1.0, 0.0]), 300, torch.tensor([0.0, 1.0]), 100)
        (tensor([0.7500, 0.2500]), 400)

    Source: Guo et al., ICCV 2025, dynamic knowledge organisation.

    Deviation: the published code multiplies the old token by its count without dividing it when a task comes back;
    this is the running mean that the paper writes.
    """
    if token.shape != new_token.shape:
        raise ValueError(
            f"`new_token` must have shape {tuple(token.shape)} as the subspace's, got {tuple(new_token.shape)}. "
            "Tokens of different encoders cannot be compared."
        )
    if not new_count > 0:
        raise ValueError(f"`new_count` must be positive, got {new_count}.")
    total = count + new_count
    mean = (count * token.double() + new_count * new_token.double()) / total
    return mean.float(), total


def token_cosines(tokens: Tensor, bank: Tensor) -> Tensor:
    """Cosine of each token to each of a bank's, in float64; 0 where one of them is zero.

    Args:
        tokens: Shape ``[K, d]``.
        bank: Shape ``[T, d]``.

    Returns:
        Shape ``[K, T]``, float64.

    Raises:
        ValueError: If the sizes differ.

    Example:
        >>> token_cosines(torch.tensor([[4.0, 3.0], [0.0, 0.0]]), torch.eye(2)).tolist()
        [[0.8, 0.6], [0.0, 0.0]]

    Source: Guo et al., ICCV 2025, dynamic knowledge organisation.
    """
    if tokens.dim() != 2 or bank.dim() != 2 or tokens.shape[1] != bank.shape[1]:
        raise ValueError(
            f"`tokens` and `bank` must have shapes [K, d] and [T, d], got {tuple(tokens.shape)} and "
            f"{tuple(bank.shape)}. Tokens of different encoders cannot be compared."
        )
    tokens, bank = tokens.detach().double(), bank.detach().double()
    lengths = tokens.norm(dim=1)[:, None] * bank.norm(dim=1)
    return torch.where(lengths > 1e-8, tokens @ bank.T / lengths.clamp_min(1e-8), 0.0)


def propose_threshold(tokens: Tensor, tasks: Sequence[int]) -> ThresholdProposal:
    """A threshold for an encoder, from held-out prompts: cosines depend on it, so .9 fits the paper's CLIP alone.

    Args:
        tokens: Identity tokens of parts of the prompts (as a client would send them), shape ``[M, d]``.
        tasks: Task of each.

    Returns:
        The threshold midway between the smallest cosine within a task and the largest between tasks. If
        ``within <= between`` no threshold separates the tasks: use another encoder.

    Raises:
        ValueError: If there are fewer than two tasks.

    Example:
        >>> proposal = propose_threshold(torch.tensor([[1.0, 0.0], [4.0, 3.0], [0.0, 1.0]]), [0, 0, 1])
        >>> round(proposal.threshold, 3), round(proposal.within, 3), round(proposal.between, 3)
        (0.7, 0.8, 0.6)

    Source: none; the paper sets .9 for its encoder.
    """
    ids = torch.as_tensor(tasks)
    if len(set(tasks)) < 2:
        raise ValueError(f"`tasks` must name at least two tasks, got {sorted(set(tasks))}.")
    cosines, same = token_cosines(tokens, tokens), ids[:, None] == ids
    inside = cosines[same & ~torch.eye(len(ids), dtype=torch.bool)]
    within = inside.min().item() if len(inside) else float("nan")
    between = cosines[~same].max().item()
    return ThresholdProposal((1.0 + between) / 2 if within != within else (within + between) / 2, within, between)
