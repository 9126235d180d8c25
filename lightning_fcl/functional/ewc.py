"""Elastic weight consolidation: a quadratic pull to old weights, scaled by their importance."""

import torch
from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes, total
from lightning_fcl.types import Params


def ewc_penalty(params: Params, anchor: Params, importance: Params, strength: float) -> Tensor:
    r"""Price of moving important weights away from ``anchor``.

    .. math:: \tfrac{\lambda}{2} \sum_i F_i \, (\theta_i - \theta^\star_i)^2

    Args:
        params: Weights being trained.
        anchor: Weights at the end of the earlier task; same names and shapes.
        importance: Diagonal Fisher information at ``anchor``, not negative; same names and shapes.
        strength: :math:`\lambda`, unitless. Codes without the one half need ``2 * strength``.

    Returns:
        Scalar; gradients reach ``params``.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> one, two, four = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 4.0))
        >>> ewc_penalty(four, anchor=one, importance=two, strength=1.0)  # 2 * 3**2 / 2
        tensor(9.)

    Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017, eq. 3
    (https://arxiv.org/abs/1612.00796).

    Deviation: None.
    """
    check_same_shapes(params=params, anchor=anchor, importance=importance)
    return 0.5 * strength * total((importance[n] * (params[n] - anchor[n]).square()).sum() for n in params)


def ewc_penalty_grad(params: Params, anchor: Params, importance: Params, strength: float) -> dict[str, Tensor]:
    r"""Gradient of :func:`ewc_penalty` with respect to ``params``: :math:`\lambda F (\theta - \theta^\star)`.

    Args:
        params: Weights being trained.
        anchor: Weights at the end of the earlier task; same names and shapes.
        importance: Diagonal Fisher information at ``anchor``; same names and shapes.
        strength: :math:`\lambda`, unitless.

    Returns:
        One tensor per name, shaped like ``params``.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> one, two, four = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 4.0))
        >>> ewc_penalty_grad(four, anchor=one, importance=two, strength=1.0)  # 2 * 3
        {'w': tensor([6.])}

    Source: as :func:`ewc_penalty`.

    Deviation: None.
    """
    check_same_shapes(params=params, anchor=anchor, importance=importance)
    return {n: strength * importance[n] * (params[n] - anchor[n]) for n in params}


def merge_quadratics(
    first: tuple[Params, Params], second: tuple[Params, Params]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    r"""Fold two tasks' pulls into one: two diagonal quadratics add up to one quadratic plus a constant.

    .. math::
        F = F_1 + F_2, \quad a = \frac{F_1 a_1 + F_2 a_2}{F}, \quad
        c = \tfrac12 \sum_i \frac{F_1 F_2}{F} (a_1 - a_2)^2

    so that ``ewc_penalty(p, a1, F1, s) + ewc_penalty(p, a2, F2, s) == ewc_penalty(p, a, F, s) + s * c``. Remembering
    all tasks therefore takes two tensors per weight, whatever their number.

    Args:
        first: ``(importance, anchor)`` of the earlier tasks; importance finite and not negative.
        second: ``(importance, anchor)`` of the new task; same names and shapes.

    Returns:
        ``(importance, anchor, offset)``: the trees formed in float64 and rounded once to the dtypes of ``first``, the
        offset a float64 scalar. Where both importances are zero, the anchor is that of ``second``.

    Raises:
        ParamMismatchError: If names or shapes differ.
        ValueError: If an importance is negative or not finite.

    Example:
        >>> first = {"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}
        >>> second = {"w": torch.tensor([3.0])}, {"w": torch.tensor([4.0])}
        >>> merge_quadratics(first, second)  # anchor (2*1 + 3*4) / 5, offset 6/5 * 9 / 2
        ({'w': tensor([5.])}, {'w': tensor([2.8000])}, tensor(5.4000, dtype=torch.float64))

    Source: completing the square; the sum over tasks is that of Kirkpatrick et al., PNAS 2017
    (https://arxiv.org/abs/1612.00796).

    Deviation: None.
    """
    check_same_shapes(importance=first[0], anchor=first[1], second_importance=second[0], second_anchor=second[1])
    importance: dict[str, Tensor] = {}
    anchor: dict[str, Tensor] = {}
    offsets: list[Tensor] = []
    for name in first[0]:
        (f1, a1), (f2, a2) = ((tree[name].detach().double() for tree in pair) for pair in (first, second))
        both = f1 + f2
        if not (torch.isfinite(both) & (f1 >= 0) & (f2 >= 0)).all():
            low, high = (bound.item() for bound in torch.stack((f1, f2)).aminmax())
            raise ValueError(
                f"`importance` must be finite and not negative, got values from {low} to {high} in {name!r}. "
                "Did a loss diverge while it was measured?"
            )
        share = torch.where(both > 0, f2 / both, 1.0)  # of the second anchor
        importance[name] = both.to(first[0][name].dtype)
        anchor[name] = torch.lerp(a1, a2, share).to(first[1][name].dtype)
        offsets.append(0.5 * (f1 * share * (a1 - a2).square()).sum())
    return importance, anchor, total(offsets).double()
