"""Several LoRA subspaces in one layer: how strongly each speaks, all of them in two matrix products, merging."""

from typing import Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fcl.functional.identity_token import token_cosines

Activation = Literal["softmax", "argmax", "cosine", "concatenation"]
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)
"""In the order in which the paper finds them: the best first."""


def activation_factors(
    features: Tensor, bank: Tensor, temperature: float = 0.05, activation: Activation = "softmax"
) -> Tensor:
    r"""How strongly each subspace speaks for each input.

    .. math:: s_i = \cos(e(x), g_i), \qquad \alpha_i = \frac{\exp(s_i / \varepsilon)}{\sum_j \exp(s_j / \varepsilon)}

    Args:
        features: Features of the inputs' instructions, shape ``[B, d]``.
        bank: The subspaces' identity tokens, shape ``[T, d]``, ``T >= 1``; subspaces nobody trained are left out.
        temperature: :math:`\varepsilon > 0`; towards 0 it becomes the argmax.
        activation: ``"softmax"``; ``"argmax"``: the most similar one alone (ties: the lowest); ``"cosine"``: the
            cosines themselves; ``"concatenation"``: all at full strength.

    Returns:
        Shape ``[B, T]``, float32. A row is zero, the base model alone, where ``features`` is zero (an empty text).

    Raises:
        ValueError: If sizes differ, the bank is empty, or an argument is out of range.

    Example:
        >>> activation_factors(torch.tensor([[4.0, 3.0]]), torch.eye(2))
        tensor([[0.9820, 0.0180]])

    Source: Guo et al., "Federated Continual Instruction Tuning", ICCV 2025, subspace selective activation
    (https://arxiv.org/abs/2503.12897).

    Deviation: a zero feature switches all subspaces off; the paper's formula would mix them evenly. The published code
    also counts subspaces that nobody trained yet, which differs by less than 4e-8 at a cosine of .95.
    """
    if not len(bank):
        raise ValueError("`bank` must hold at least one token, got none. Without subspaces run the base model.")
    if not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")
    cosines = token_cosines(features, bank)
    if activation == "softmax":
        factors = torch.softmax(cosines / temperature, dim=1)
    elif activation == "argmax":
        factors = F.one_hot(cosines.argmax(1), len(bank)).double()
    elif activation == "cosine":
        factors = cosines
    elif activation == "concatenation":
        return torch.ones(cosines.shape, device=cosines.device)
    else:
        raise ValueError(f"`activation` must be softmax, argmax, cosine or concatenation, got {activation!r}.")
    return (factors * (features.abs().sum(1, keepdim=True) > 0)).float()


def subspace_lora(x: Tensor, a: Tensor, b: Tensor, factors: Tensor, scaling: float) -> Tensor:
    r"""What a bank of LoRA subspaces adds to a layer, in the concatenated block form: two matrix products, not 2T.

    .. math::
        \varsigma \, \bar B \, \mathrm{diag}(\alpha_1 I_r, \dots, \alpha_T I_r) \, \bar A \, x
        = \varsigma \sum_i \alpha_i B_i A_i x

    Args:
        x: Input of the layer, shape ``[B, ..., in]``.
        a: Down-projections, shape ``[T, r, in]``.
        b: Up-projections, shape ``[T, out, r]``; no copy is made if it is a view of contiguous ``[out, T, r]``.
        factors: Activation per sample, ``[B, T]``, or per position, ``[B, ..., T]``; any float dtype.
        scaling: :math:`\varsigma`, i.e. LoRA's alpha over the *total* rank.

    Returns:
        Shape ``[B, ..., out]``; gradients reach all tensors.

    Raises:
        ValueError: If shapes do not fit.

    Example:
        >>> x, a, b = torch.tensor([[1.0, 2.0]]), torch.ones(2, 1, 2), torch.tensor([[[1.0]], [[10.0]]])
        >>> subspace_lora(x, a, b, torch.tensor([[0.5, 1.0]]), scaling=2.0)  # 2 * (0.5 * 1 * 3 + 1 * 10 * 3)
        tensor([[63.]])

    Source: Guo et al., ICCV 2025, subspace selective activation.

    Deviation: None.
    """
    count, rank, width = a.shape
    if b.shape != (count, b.shape[1], rank) or x.shape[-1] != width or factors.shape[-1] != count:
        raise ValueError(
            f"`x`, `a`, `b`, `factors` must have shapes [B, ..., in], [T, r, in], [T, out, r], [B, T], got "
            f"{tuple(x.shape)}, {tuple(a.shape)}, {tuple(b.shape)}, {tuple(factors.shape)}."
        )
    if factors.dim() == 2:
        factors = factors.view(len(factors), *(1 for _ in x.shape[1:-1]), count)
    return scaled_lora(x, a, b, (factors * scaling).to(x.dtype).repeat_interleave(rank, dim=-1))


def scaled_lora(x: Tensor, a: Tensor, b: Tensor, scales: Tensor) -> Tensor:
    """:func:`subspace_lora` with a scale per row of the stacked ``a``, shape ``[B, ..., T r]``; nothing is checked."""
    return F.linear(F.linear(x, a.flatten(0, 1)) * scales, b.transpose(0, 1).flatten(1))


def merge_lora(
    a: Tensor, b: Tensor, weights: Tensor, method: Literal["factors", "products"] = "factors"
) -> tuple[Tensor, Tensor]:
    r"""Several LoRA pairs as one of the same rank.

    ``"factors"`` averages A and B by themselves, what federated LoRA usually does; the product of the means is not the
    mean of the products unless one factor is shared. ``"products"`` returns the best pair of rank r for
    :math:`\sum_k w_k B_k A_k` (a truncated SVD, by QR of the stacked factors: never larger than ``[K r, K r]``).

    Args:
        a: Shape ``[K, r, in]``.
        b: Shape ``[K, out, r]``.
        weights: Shape ``[K]``; used as they are.
        method: ``"factors"`` or ``"products"``.

    Returns:
        ``A`` of shape ``[r, in]`` and ``B`` of shape ``[out, r]`` in the inputs' dtype, formed in float64. The singular
        values are shared evenly between them; signs make the largest element of each column of ``B`` positive.

    Raises:
        ValueError: If shapes do not fit or ``method`` is unknown.

    Example:
        >>> a, b, half = torch.tensor([[[2.0]], [[4.0]]]), torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([0.5, 0.5])
        >>> [round((y @ x).item(), 4) for x, y in (merge_lora(a, b, half, m) for m in ("factors", "products"))]
        [6.0, 7.0]

    Source: factors: Guo et al., ICCV 2025; the SVD of the mean of products is the Eckart-Young theorem.
    """
    if method not in ("factors", "products") or b.shape[::2] != a.shape[:2] or weights.shape != a.shape[:1]:
        raise ValueError(
            f'`method` must be "factors" or "products" and shapes [K, r, in], [K, out, r], [K], got {method!r}, '
            f"{tuple(a.shape)}, {tuple(b.shape)}, {tuple(weights.shape)}."
        )
    down, up, mass = a.detach().double(), b.detach().double(), weights.double()
    if method == "factors":
        return torch.einsum("k,kri->ri", mass, down).to(a.dtype), torch.einsum("k,kor->or", mass, up).to(b.dtype)
    left, core = torch.linalg.qr((mass[:, None, None] * up).transpose(0, 1).flatten(1))
    right, tail = torch.linalg.qr(down.flatten(0, 1).T)
    u, s, vh = torch.linalg.svd(core @ tail.T)
    rank = min(a.shape[1], len(s))
    columns, rows = left @ u[:, :rank], vh[:rank] @ right.T
    signs = torch.gather(columns, 0, columns.abs().argmax(0)[None]).sign()
    root = s[:rank].sqrt()
    new_a, new_b = torch.zeros_like(down[0]), torch.zeros_like(up[0])
    new_a[:rank], new_b[:, :rank] = (root[:, None] * rows) * signs.T, columns * root * signs
    return new_a.to(a.dtype), new_b.to(b.dtype)
