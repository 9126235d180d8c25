"""Synaptic intelligence: what a weight did for the loss while a task was learned."""

from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes, total
from lightning_fcl.types import Params


def path_integral(gradient: Params, before: Params, after: Params) -> dict[str, Tensor]:
    r"""How far one optimiser step lowered the loss, weight by weight, to first order.

    .. math:: \omega_i = -g_i \, (\theta_i^{after} - \theta_i^{before})

    Args:
        gradient: Gradient of the task's loss at ``before``; neither clipped nor with a penalty in it.
        before: Weights before the step; same names and shapes.
        after: Weights after it; same names and shapes.

    Returns:
        One tensor per name, in units of the loss.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> import torch
        >>> one, two, zero = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 0.0))
        >>> path_integral(two, before=one, after=zero)
        {'w': tensor([2.])}

    Source: Zenke, Poole & Ganguli, "Continual Learning Through Synaptic Intelligence", ICML 2017, eq. 3
    (https://arxiv.org/abs/1703.04200).

    Deviation: None.
    """
    check_same_shapes(gradient=gradient, before=before, after=after)
    return {name: -gradient[name] * (after[name] - before[name]) for name in gradient}


def si_importance(
    path: Params, start: Params, end: Params, damping: float, old: Params | None = None
) -> dict[str, Tensor]:
    r"""Importance of each weight after a task.

    .. math:: \Omega_i = \max\left(0, \; \Omega_i^{old}
        + \frac{\omega_i}{(\theta_i^{end} - \theta_i^{start})^2 + \xi}\right)

    Args:
        path: :math:`\omega`, summed over all steps of the task.
        start: Weights at the task's start; same names and shapes.
        end: Weights at its end; same names and shapes.
        damping: :math:`\xi > 0`, in squared units of the weights.
        old: Importance after the earlier tasks; names it lacks count as 0.

    Returns:
        One tensor per name of ``path``, never negative.

    Raises:
        ParamMismatchError: If names or shapes of ``path``, ``start`` and ``end`` differ.

    Example:
        >>> import torch
        >>> one, zero = ({"w": torch.tensor([value])} for value in (1.0, 0.0))
        >>> si_importance(one, start=one, end=zero, damping=0.25)  # 1 / 1.25
        {'w': tensor([0.8000])}

    Source: Zenke, Poole & Ganguli, ICML 2017, eq. 5 (https://arxiv.org/abs/1703.04200).

    Deviation: cut off at 0. In the equation a weight that raised the loss gets a negative importance, which would
    reward leaving the anchor without bound.
    """
    check_same_shapes(path=path, start=start, end=end)
    old = old or {}
    gained = {n: path[n] / ((end[n] - start[n]).square() + damping) for n in path}
    return {name: (old[name] + value if name in old else value).clamp(min=0) for name, value in gained.items()}


def si_penalty(params: Params, anchor: Params, importance: Params, strength: float) -> Tensor:
    r"""Price of moving important weights away from ``anchor``; its gradient is ``ewc_penalty_grad(..., 2 * strength)``.

    .. math:: c \sum_i \Omega_i \, (\theta_i - \theta^\star_i)^2

    Args:
        params: Weights being trained.
        anchor: Weights at the end of the earlier task; same names and shapes.
        importance: :math:`\Omega`; same names and shapes.
        strength: :math:`c`, unitless; there is no one half.

    Returns:
        Scalar; gradients reach ``params``.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> import torch
        >>> one, two, four = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 4.0))
        >>> si_penalty(four, anchor=one, importance=two, strength=1.0)  # 2 * 3**2
        tensor(18.)

    Source: Zenke, Poole & Ganguli, ICML 2017, eq. 4 (https://arxiv.org/abs/1703.04200).

    Deviation: None.
    """
    check_same_shapes(params=params, anchor=anchor, importance=importance)
    return strength * total((importance[n] * (params[n] - anchor[n]).square()).sum() for n in params)
