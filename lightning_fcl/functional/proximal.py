"""Pulls toward an anchor: SPECIAL's closed-form blend and FedProx's penalty."""

import math

from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes, total
from lightning_fcl.types import Params


def proximal_blend(aggregate: Tensor, anchor: Tensor, strength: float) -> Tensor:
    r"""The point between ``aggregate`` and ``anchor`` that the quadratic pull picks, in closed form.

    .. math:: \arg\min_u \|u - x\|^2 + \lambda \|u - a\|^2 = \frac{x + \lambda a}{1 + \lambda}

    Args:
        aggregate: New weights :math:`x`, shape ``(P,)``, any float dtype.
        anchor: Old weights :math:`a`, shape ``(P,)``.
        strength: :math:`\lambda \ge 0`, unitless. ``0`` gives ``aggregate`` bit for bit.

    Returns:
        Shape ``(P,)``, formed in float64 and rounded once to the dtype of ``aggregate``; gradients flow.

    Raises:
        ValueError: If ``strength`` is negative or not finite, the shapes differ, or a dtype is not a float.

    Example:
        >>> import torch
        >>> proximal_blend(torch.tensor([3.0]), torch.tensor([1.0]), 0.25)  # (3 + 0.25) / 1.25
        tensor([2.6000])

    Source: SPECIAL, server step.

    Deviation: written as :math:`x + \frac{\lambda}{1+\lambda} (a - x)`, so that ``aggregate == anchor`` is a fixed
    point bit for bit for every strength.
    """
    _check_strength(strength)
    if aggregate.shape != anchor.shape:
        raise ValueError(
            f"`anchor` must have the shape of `aggregate`, got {tuple(anchor.shape)} and {tuple(aggregate.shape)}. "
            "Blend only the entries that existed when the anchor was stored."
        )
    if not (aggregate.is_floating_point() and anchor.is_floating_point()):
        raise ValueError(
            f"`aggregate` and `anchor` must be floats, got {aggregate.dtype}, {anchor.dtype}. Copy counters."
        )
    if strength == 0:
        return aggregate.clone()
    wide = aggregate.double()
    return (wide + (anchor.double() - wide) * (strength / (1.0 + strength))).to(aggregate.dtype)


def proximal_penalty(params: Params, anchor: Params, strength: float) -> Tensor:
    r"""Price of moving away from ``anchor``, the same for every weight.

    .. math:: \tfrac{\mu}{2} \sum_i (\theta_i - a_i)^2

    Args:
        params: Weights being trained.
        anchor: The round's global weights; same names and shapes.
        strength: :math:`\mu \ge 0`, unitless.

    Returns:
        Scalar in the dtype of ``params``; gradients reach ``params``.

    Raises:
        ParamMismatchError: If names or shapes differ.
        ValueError: If ``strength`` is negative or not finite.

    Example:
        >>> import torch
        >>> proximal_penalty({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, strength=1.0)
        tensor(2.)

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2
    (https://arxiv.org/abs/1812.06127).

    Deviation: None. (Some codes use the norm without its square, which is another method.)
    """
    _check_strength(strength)
    check_same_shapes(params=params, anchor=anchor)
    return 0.5 * strength * total((params[name] - anchor[name]).square().sum() for name in params)


def proximal_penalty_grad(params: Params, anchor: Params, strength: float) -> dict[str, Tensor]:
    r"""Gradient of :func:`proximal_penalty` with respect to ``params``: :math:`\mu (\theta - a)`.

    Args:
        params: Weights being trained.
        anchor: The round's global weights; same names and shapes.
        strength: :math:`\mu \ge 0`, unitless.

    Returns:
        One tensor per name, shaped like ``params``.

    Raises:
        ParamMismatchError: If names or shapes differ.
        ValueError: If ``strength`` is negative or not finite.

    Example:
        >>> import torch
        >>> proximal_penalty_grad({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}, strength=1.0)
        {'w': tensor([3., 4.])}

    Source: as :func:`proximal_penalty`.

    Deviation: None.
    """
    _check_strength(strength)
    check_same_shapes(params=params, anchor=anchor)
    return {name: strength * (params[name] - anchor[name]) for name in params}


def _check_strength(strength: float) -> None:
    if not (math.isfinite(strength) and strength >= 0):
        raise ValueError(f"`strength` must be finite and not negative, got {strength}. Use 0 to switch the pull off.")
