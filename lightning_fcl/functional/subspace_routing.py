"""Which subspace each client of a round trains."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fcl.functional.identity_token import token_cosines


class Routing(NamedTuple):
    """Where each client of a round goes.

    Args:
        slots: Subspace of each client, int64 of shape ``[K]``; ``T`` and above are subspaces opened now.
        opened: How many subspaces the round opens.
        forced: Clients that matched nothing and found no room for a new subspace, bool of shape ``[K]``.
        cosines: Cosine of each client's token to each subspace's, shape ``[K, T]``, float64.
    """

    slots: Tensor
    opened: int
    forced: Tensor
    cosines: Tensor


def route_tokens(
    tokens: Tensor, counts: Tensor, bank: Tensor, threshold: float = 0.9, capacity: int | None = None
) -> Routing:
    """Give every client of a round one subspace; whoever matches none joins or opens a new one.

    A client goes to the most similar subspace if its cosine is at least ``threshold`` (ties: the lowest). The others,
    the largest first, join the most similar of the groups opened before them under the same rule, or open a group of
    their own. Where ``capacity`` leaves no room they go to the most similar subspace or group there is, and are marked.

    Args:
        tokens: The clients' identity tokens, shape ``[K, d]``.
        counts: Their examples, shape ``[K]``.
        bank: The subspaces' tokens, shape ``[T, d]``; ``[0, d]`` in the first round.
        threshold: Least cosine of a match, in [-1, 1].
        capacity: Most subspaces there may be; ``None`` for no limit.

    Returns:
        The routing.

    Raises:
        ValueError: If shapes differ, a token is not finite, ``threshold`` is no cosine or ``capacity`` is below 1.

    Example:
        >>> routing = route_tokens(torch.tensor([[9.0, 4.0], [4.0, 3.0]]), torch.tensor([10, 10]), torch.eye(2))
        >>> routing.slots, routing.opened
        (tensor([0, 2]), 1)

    Source: Guo et al., ICCV 2025, dynamic knowledge organisation.

    Deviation: the published code decides on the client and per mini-batch, groups clients only afterwards (a client can
    fall into two groups, or into a subspace that it never trained) and uses three rules. Here one rule decides on the
    server before anybody trains, as the paper describes it.
    """
    _check(tokens, counts, threshold, capacity)
    cosines = token_cosines(tokens, bank)
    slots = torch.full((len(tokens),), -1, dtype=torch.int64)
    if len(bank):
        best = cosines.max(1)
        slots = torch.where(best.values >= threshold, best.indices, slots)
    forced = torch.zeros(len(tokens), dtype=torch.bool)
    known = bank.detach().double()
    pending = (slots < 0).nonzero().flatten().tolist()
    for k in sorted(pending, key=lambda k: (-float(counts[k]), k)):
        near = token_cosines(tokens[k : k + 1], known)[0]
        groups = near[len(bank) :]
        if len(groups) and groups.max() >= threshold:
            slots[k] = len(bank) + int(groups.argmax())
        elif capacity is None or len(known) < capacity:
            slots[k] = len(known)
            known = torch.cat([known, tokens[k : k + 1].detach().double()])
        else:
            slots[k] = int(near.argmax())
            forced[k] = True
    return Routing(slots, len(known) - len(bank), forced, cosines)


def _check(tokens: Tensor, counts: Tensor, threshold: float, capacity: int | None) -> None:
    if tokens.dim() != 2 or counts.shape != tokens.shape[:1]:
        raise ValueError(
            f"`tokens` must have shape [K, d] and `counts` [K], got {tuple(tokens.shape)} and {tuple(counts.shape)}."
        )
    if not torch.isfinite(tokens).all():
        raise ValueError("`tokens` must be finite, got NaN or infinite values. Drop such clients first.")
    if not -1 <= threshold <= 1:
        raise ValueError(f"`threshold` must be a cosine in [-1, 1], got {threshold}.")
    if capacity is not None and capacity < 1:
        raise ValueError(f"`capacity` must be at least 1 or None, got {capacity}.")
