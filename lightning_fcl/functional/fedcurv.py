"""FedCurv: stay where the other clients' weights matter to them, from two sums that the server sends."""

from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes, total
from lightning_fcl.types import Params


def fedcurv_penalty(params: Params, precision: Params, pull: Params, strength: float) -> Tensor:
    r"""Price of leaving the other clients' weights, up to a constant.

    .. math:: \lambda \sum_{j \ne i} (\theta - \theta_j)^\top F_j (\theta - \theta_j)
        = \lambda (\theta^\top P \theta - 2 \theta^\top q) + \text{const}

    Args:
        params: Weights being trained.
        precision: :math:`P = \sum_{j \ne i} F_j`, diagonal Fisher informations; same names and shapes.
        pull: :math:`q = \sum_{j \ne i} F_j \theta_j`; same names and shapes.
        strength: :math:`\lambda`, unitless; there is no one half.

    Returns:
        Scalar, possibly negative since the constant is left out; gradients reach ``params``.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> import torch
        >>> w, precision, pull = ({"w": torch.tensor([value])} for value in (1.0, 3.0, 6.0))
        >>> fedcurv_penalty(w, precision, pull, strength=1.0)  # 3 - 2 * 6; the minimum is at w = 6 / 3
        tensor(-9.)

    Source: Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", NeurIPS 2019 workshop, sec. 3
    (https://arxiv.org/abs/1910.07796).

    Deviation: None.
    """
    check_same_shapes(params=params, precision=precision, pull=pull)
    return strength * total((params[n] * (precision[n] * params[n] - 2 * pull[n])).sum() for n in params)


def fedcurv_penalty_grad(params: Params, precision: Params, pull: Params, strength: float) -> dict[str, Tensor]:
    r"""Gradient of :func:`fedcurv_penalty` with respect to ``params``: :math:`2 \lambda (P \theta - q)`.

    Args:
        params: As in :func:`fedcurv_penalty`.
        precision: As in :func:`fedcurv_penalty`.
        pull: As in :func:`fedcurv_penalty`.
        strength: As in :func:`fedcurv_penalty`.

    Returns:
        One tensor per name.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> import torch
        >>> w, precision, pull = ({"w": torch.tensor([value])} for value in (1.0, 3.0, 6.0))
        >>> fedcurv_penalty_grad(w, precision, pull, strength=0.5)
        {'w': tensor([-3.])}

    Source: as :func:`fedcurv_penalty`.

    Deviation: None.
    """
    check_same_shapes(params=params, precision=precision, pull=pull)
    return {n: 2 * strength * (precision[n] * params[n] - pull[n]) for n in params}


def fedcurv_others(precision: Params, pull: Params, own: Params, own_pull: Params) -> tuple[Params, Params]:
    """Take a client's own part out of the sums over all clients.

    Args:
        precision: Sum of all clients' Fisher informations by name.
        pull: Sum of all clients' Fisher informations times weights; same names and shapes.
        own: The client's own Fisher information as it sent it last; names it lacks count as 0.
        own_pull: The client's own product as it sent it last.

    Returns:
        The two sums over the others. What rounding leaves of a weight that no other client values is 0.

    Example:
        >>> import torch
        >>> total, own = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
        >>> fedcurv_others(total, total, own, own)
        ({'w': tensor([2.])}, {'w': tensor([2.])})

    Source: Shoham et al., 2019, sec. 3 (https://arxiv.org/abs/1910.07796).

    Deviation: None.
    """
    left = {n: (value - own[n]).clamp(min=0) if n in own else value for n, value in precision.items()}
    pulls = {n: value - own_pull[n] if n in own_pull else value for n, value in pull.items()}
    return left, {n: value.where(left[n] > 0, 0.0) for n, value in pulls.items()}
