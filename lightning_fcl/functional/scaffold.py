"""SCAFFOLD: control variates that take the drift out of local training."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes
from lightning_fcl.types import Params


def scaffold_variate(own: Params, server: Params, start: Params, end: Params, travel: Mapping[str, float]) -> Params:
    r"""A client's new control variate from how far it moved (option II).

    .. math:: c_i^+ = c_i - c + \frac{\theta^t - \theta_i}{K \eta}

    Args:
        own: :math:`c_i`, the client's variate, by name.
        server: :math:`c`, the server's; same names and shapes.
        start: Weights that the round started from; same names and shapes.
        end: Weights after local training; same names and shapes.
        travel: :math:`K \eta` by name: how far a gradient of 1 at every step would have moved a weight, see
            :func:`sgd_travel`. Positive.

    Returns:
        :math:`c_i^+` by name: the mean gradient of the client along its way, so in units of a gradient.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> import torch
        >>> one, two, zero = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 0.0))
        >>> scaffold_variate(zero, one, start=two, end=zero, travel={"w": 0.5})  # 0 - 1 + 2 / 0.5
        {'w': tensor([3.])}

    Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm
    1, option II (https://arxiv.org/abs/1910.06378).

    Deviation: None for SGD without momentum at a constant rate; ``travel`` keeps it exact for schedules and momentum.
    """
    check_same_shapes(own=own, server=server, start=start, end=end)
    return {n: own[n] - server[n] + (start[n] - end[n]) / travel[n] for n in own}


def sgd_travel(
    rates: Sequence[float], momenta: Sequence[float] | None = None, *, dampening: float = 0.0, nesterov: bool = False
) -> float:
    r"""How far SGD moves a weight whose gradient is 1 at every step, starting without momentum.

    Without momentum the sum of the rates. With a constant momentum :math:`\rho` it is :math:`\eta K'` with
    :math:`K' = (K - \rho (1 - \rho^K) / (1 - \rho)) / (1 - \rho)`.

    Args:
        rates: Learning rate of every step.
        momenta: Momentum of every step; none by default.
        dampening: As in :class:`torch.optim.SGD`.
        nesterov: As in :class:`torch.optim.SGD`.

    Returns:
        The distance.

    Example:
        >>> round(sgd_travel([1.0] * 20, [0.9] * 20), 2)
        120.94
        >>> sgd_travel([0.5, 0.25])
        0.75

    Source: the update rule of :class:`torch.optim.SGD`.

    Deviation: None.
    """
    distance, velocity = 0.0, 0.0
    for step, rate in enumerate(rates):
        momentum = momenta[step] if momenta is not None else 0.0
        if not momentum:
            distance += rate
            continue
        velocity = momentum * velocity + (1.0 - dampening) if velocity else 1.0
        distance += rate * (1.0 + momentum * velocity if nesterov else velocity)
    return distance


def scaffold_server(server: Params, change: Mapping[str, Tensor], clients: int) -> dict[str, Tensor]:
    r"""The server's new control variate.

    .. math:: c \leftarrow c + \frac{|S|}{N} \, \frac{1}{|S|} \sum_{i \in S} (c_i^+ - c_i)

    Args:
        server: :math:`c` by name; names it lacks count as 0.
        change: :math:`\sum_{i \in S} (c_i^+ - c_i)` by name: a sum, not a mean.
        clients: :math:`N`, the number of clients in all, not of those in the round.

    Returns:
        :math:`c` by name, in the dtype of ``change``. If it starts at 0 it is always the mean of all clients' variates.

    Example:
        >>> import torch
        >>> scaffold_server({}, {"w": torch.tensor([6.0])}, clients=4)
        {'w': tensor([1.5000])}

    Source: Karimireddy et al., ICML 2020, eq. 5 (https://arxiv.org/abs/1910.06378).

    Deviation: None.
    """
    return {n: step / clients + server.get(n, 0.0) for n, step in change.items()}
