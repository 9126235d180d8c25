"""FedDyn: a linear and a quadratic term align every client's stationary point with the common one."""

from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes
from lightning_fcl.types import Params


def feddyn_grad(params: Params, anchor: Params, dual: Params, strength: float) -> dict[str, Tensor]:
    r"""Gradient of the two terms that FedDyn adds to a client's loss.

    .. math:: \nabla \left( -\langle g_i, \theta \rangle + \tfrac{\alpha}{2} \|\theta - \theta^t\|^2 \right)
        = \alpha (\theta - \theta^t) - g_i

    Args:
        params: Weights being trained.
        anchor: :math:`\theta^t`, the weights that the round started from; same names and shapes.
        dual: :math:`g_i`, the client's; same names and shapes.
        strength: :math:`\alpha > 0`, unitless.

    Returns:
        One tensor per name.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> import torch
        >>> one, two, three = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 3.0))
        >>> feddyn_grad(three, anchor=one, dual=two, strength=0.5)  # 0.5 * 2 - 2
        {'w': tensor([-1.])}

    Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, eq. 1
    (https://arxiv.org/abs/2111.04263).

    Deviation: None.
    """
    check_same_shapes(params=params, anchor=anchor, dual=dual)
    return {name: strength * (params[name] - anchor[name]) - dual[name] for name in params}


def feddyn_dual(params: Params, anchor: Params, dual: Params, strength: float) -> dict[str, Tensor]:
    r"""A client's :math:`g_i` after its job: the gradient of its own loss there, if it solved the local problem.

    .. math:: g_i \leftarrow g_i - \alpha (\theta_i - \theta^t)

    Args:
        params: :math:`\theta_i`, the weights after local training.
        anchor: Weights that the round started from; same names and shapes.
        dual: :math:`g_i`; same names and shapes.
        strength: :math:`\alpha > 0`.

    Returns:
        One tensor per name.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> import torch
        >>> one, two, three = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 3.0))
        >>> feddyn_dual(three, anchor=one, dual=two, strength=0.5)  # 2 - 0.5 * 2
        {'w': tensor([1.])}

    Source: Acar et al., ICLR 2021, Algorithm 1 (https://arxiv.org/abs/2111.04263).

    Deviation: None.
    """
    return {name: -value for name, value in feddyn_grad(params, anchor, dual, strength).items()}


def feddyn_server(delta: Tensor, dual: Tensor, strength: float, share: float) -> tuple[Tensor, Tensor]:
    r"""The server's step.

    .. math:: h \leftarrow h - \alpha \frac{|S|}{N} \bar\Delta, \qquad \theta \leftarrow \theta + \bar\Delta - h /
    \alpha

    Args:
        delta: :math:`\bar\Delta`, the plain mean over the round's clients of new less old weights, shape ``(P,)``.
        dual: :math:`h`, zero at the start, shape ``(P,)``.
        strength: :math:`\alpha > 0`.
        share: :math:`|S| / N`: clients of the round over clients in all.

    Returns:
        The delta to apply and the new :math:`h`, which is always the mean over *all* clients of their :math:`g_i`.

    Example:
        >>> import torch
        >>> feddyn_server(torch.tensor([2.0]), torch.tensor([1.0]), strength=0.5, share=0.25)
        (tensor([0.5000]), tensor([0.7500]))

    Source: Acar et al., ICLR 2021, Algorithm 1 (https://arxiv.org/abs/2111.04263).

    Deviation: None.
    """
    dual = dual - strength * share * delta
    return delta - dual / strength, dual
