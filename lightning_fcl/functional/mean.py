"""Exact weighted sums of flat updates: float64, tile by tile, along one fixed binary tree, rounded once."""

import math

import torch
from torch import Tensor

_BUFFER_ELEMENTS = 262_144  # of float64: a tile of all rows lies in cache, and few calls are made
_DOT_ELEMENTS = 65_536  # a tile of a dot product, whose bits depend on it
_FLOAT32_SAFE = 1e-20  # a sum of float32 products below this may have lost products that vanished


def tree_sum(rows: Tensor) -> Tensor:
    """Sum rows along the left-complete binary tree: ``((0+1)+(2+3))+4`` for five rows.

    The tree depends on the number of rows alone, and a slab of ``2**k`` rows is a whole subtree. So summing slabs
    first, on any rank, and then their sums gives the same bits as summing all rows at once.

    Args:
        rows: Shape ``(K, n)``, float64, ``K >= 1``.

    Returns:
        Shape ``(n,)``, float64; no gradient.

    Raises:
        ValueError: If ``rows`` is not a float64 matrix with at least one row.

    Example:
        >>> tree_sum(torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64))
        tensor([6.], dtype=torch.float64)
    """
    if rows.dim() != 2 or not len(rows) or rows.dtype != torch.float64:
        raise ValueError(
            f"`rows` must be float64 of shape (K, n) with K >= 1, got {rows.dtype} of shape {tuple(rows.shape)}. "
            "Convert with `rows.double()`: rounding comes last."
        )
    rows = rows.detach()
    return _tree_sum_(rows.clone(), torch.empty_like(rows[0]))


def weighted_mean(updates: Tensor, weights: Tensor) -> Tensor:
    r"""Mean of the clients' updates, weighted and exact to the last bit of the updates' dtype.

    .. math:: \bar u = \frac{\sum_k w_k u_k}{\sum_k w_k}

    Args:
        updates: One row per client, shape ``(K, P)``, any float dtype.
        weights: Non-negative weights (examples, or ones for the plain mean), shape ``(K,)``, any real dtype.

    Returns:
        Shape ``(P,)``, in the dtype of ``updates``; a copy of the row if there is only one. No gradient.

    Raises:
        ValueError: If a shape or dtype is wrong, a weight is negative or not finite, or all weights are zero.

    Example:
        >>> weighted_mean(torch.tensor([[1.0], [3.0]]), torch.tensor([100, 300]))
        tensor([2.5000])

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    Algorithm 1 (https://arxiv.org/abs/1602.05629).

    Deviation: None.
    """
    _check_rows("updates", updates, weights)
    if not updates.is_floating_point():
        raise ValueError(f"`updates` must be of a float dtype, got {updates.dtype}. Integer buffers are copied.")
    weights = weights.to(torch.float64)
    if not (torch.isfinite(weights) & (weights >= 0)).all():
        raise ValueError(f"`weights` must be finite and not negative, got {weights.tolist()}. Drop such clients first.")
    mass = tree_sum(weights[:, None])
    if not 0 < mass < torch.inf:
        raise ValueError(f"`weights` must have a positive, finite total, got {mass.item()}. Is the round empty?")
    if len(updates) == 1:
        return updates[0].detach().clone()
    return _weighted_sum(updates, weights).div_(mass.to(updates.device)).to(updates.dtype)


def weighted_delta_sum(rows: Tensor, reference: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    r"""One slab's node of the exact sum of weighted deltas.

    .. math:: \sum_k w_k \, (r_k - \mathrm{reference})

    Args:
        rows: New weights of the slab's clients, shape ``(K, P)``, any real dtype.
        reference: Weights that they started from, shape ``(P,)``.
        weights: Shape ``(K,)``, any real dtype; values are not checked.
        out: Float64 of shape ``(P,)`` to write into; allocated if absent.

    Returns:
        Shape ``(P,)``, float64, neither divided nor rounded; no gradient. Memory beyond ``out`` is one tile.

    Raises:
        ValueError: If a shape is wrong or ``out`` is not float64.

    Example:
        >>> weighted_delta_sum(torch.tensor([[2.0], [5.0]]), torch.tensor([1.0]), torch.tensor([1, 3]))
        tensor([13.], dtype=torch.float64)
    """
    _check_rows("rows", rows, weights)
    for name, tensor in (("reference", reference), ("out", out)):
        if tensor is not None and tensor.shape != rows.shape[1:]:
            raise ValueError(f"`{name}` must have shape {tuple(rows.shape[1:])}, got {tuple(tensor.shape)}.")
    if out is not None and out.dtype != torch.float64:
        raise ValueError(f"`out` must be float64, got {out.dtype}. Rounding comes last.")
    return _weighted_sum(rows, weights.to(torch.float64), reference, out)


@torch.no_grad()
def delta_dot(row: Tensor, reference: Tensor | None = None, direction: Tensor | None = None) -> float:
    """Inner product of a delta with a direction; products in float32, their sum in float64.

    Float32 products cost less than float64 ones. Each is rounded by itself and the sum is not, so the error is below
    1e-6 of the product of the lengths, even where all entries are alike, as in an update of signs. Where products
    overflow, or vanish, all is done again in float64.

    Args:
        row: New weights, shape ``(P,)``.
        reference: Old weights, shape ``(P,)``; zeros by default.
        direction: Shape ``(P,)``; by default the delta itself, which gives its squared length.

    Returns:
        The sum over elements of ``(row - reference) * direction``.

    Example:
        >>> delta_dot(torch.tensor([4.0, 6.0]), torch.tensor([1.0, 2.0]))
        25.0
    """
    found = 0.0
    if row.dtype != torch.float64:
        found = _delta_dot(row, reference, direction, torch.float32)
    small = abs(found) < _FLOAT32_SAFE
    return _delta_dot(row, reference, direction, torch.float64) if small or not math.isfinite(found) else found


def _delta_dot(row: Tensor, reference: Tensor | None, direction: Tensor | None, dtype: torch.dtype) -> float:
    total = torch.zeros((), dtype=torch.float64, device=row.device)
    buffer, products = torch.empty(2, min(_DOT_ELEMENTS, len(row)), dtype=dtype, device=row.device)
    for start in range(0, len(row), _DOT_ELEMENTS):
        part = slice(start, start + _DOT_ELEMENTS)
        delta = row[part].to(dtype)
        if reference is not None:
            delta = torch.sub(delta, reference[part].to(dtype), out=buffer[: len(delta)])
        other = delta if direction is None else direction[part].to(dtype)
        total += torch.mul(delta, other, out=products[: len(delta)]).sum(dtype=torch.float64)
    return total.item()


@torch.no_grad()
def _weighted_sum(rows: Tensor, weights: Tensor, reference: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    count, size = rows.shape
    out = torch.empty(size, dtype=torch.float64, device=rows.device) if out is None else out
    column = weights.to(rows.device)[:, None]
    tile = min(max(1_024, _BUFFER_ELEMENTS // count), max(size, 1))
    buffer = torch.empty(count, tile, dtype=torch.float64, device=rows.device)
    origin = torch.empty(tile, dtype=torch.float64, device=rows.device)
    for start in range(0, size, tile):
        end = min(start + tile, size)
        block = buffer[:, : end - start].copy_(rows[:, start:end])
        if reference is not None:
            block.sub_(origin[: end - start].copy_(reference[start:end]))
        _tree_sum_(block.mul_(column), out[start:end])  # separate products and sums: no fused rounding anywhere
    return out


def _tree_sum_(rows: Tensor, out: Tensor) -> Tensor:
    """Sum into ``out``, spoiling ``rows``: at distance 1, then 2, then 4, which is the left-complete tree."""
    step, count = 1, len(rows)
    while 2 * step < count:
        rows[: count - step : 2 * step].add_(rows[step :: 2 * step])
        step *= 2
    return torch.add(rows[0], rows[step], out=out) if step < count else out.copy_(rows[0])


def _check_rows(name: str, rows: Tensor, weights: Tensor) -> None:
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"`{name}` must have shape (K, P) with K >= 1, got {tuple(rows.shape)}. Stack flat updates.")
    if weights.shape != rows.shape[:1]:
        raise ValueError(f"`weights` must have shape ({len(rows)},), one per row, got {tuple(weights.shape)}.")
