"""FedACG: clients start where the server's momentum is about to carry the weights."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fcl.aggregators.base import Reducer, RoundStats, ServerStep
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.aggregators.fedopt import check_beta
from lightning_fcl.functional.fedopt import look_ahead, server_momentum
from lightning_fcl.types import MethodCard


class FedACG(ServerStep):
    r"""Server momentum whose look-ahead is sent to the clients.

    .. math:: \hat\theta = \theta + \lambda m \ \text{ is sent}, \qquad
              m \leftarrow \lambda m + \tfrac{1}{|S|} \textstyle\sum_k (\theta_k - \hat\theta), \qquad
              \theta \leftarrow \theta + m

    This is the server's half. The clients' half pulls local training toward :math:`\hat\theta`, the weights that they
    were sent, and that is :class:`~lightning_fcl.FedProx`: the method is
    ``aggregator=FedACG(0.85), callbacks=[FedProx(0.002)]``. What is evaluated, committed, and measured at a task's end
    is :math:`\theta`. Float buffers follow the mean.

    Args:
        momentum: :math:`\lambda` in [0, 1); 0 is FedAvg.
        reset_on_task: Forget the momentum when a task begins.

    Raises:
        MisconfigurationError: If ``momentum`` is out of range.

    Source: Kim, Kim & Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024,
    Algorithm 1 (https://arxiv.org/abs/2201.03172).

    Deviation: None with the default reducer, the plain mean. The authors' code has no 1/2 in the pull, so their
    :math:`\beta` of .001 is ``FedProx(0.002)``.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedACG",
        acts_on="server",
        paper="Kim, Kim & Han, CVPR 2024",
        url="https://arxiv.org/abs/2201.03172",
        functions=("server_momentum", "look_ahead"),
        smoke={"momentum": 0.85},
        neutral={"momentum": 0.0},
    )

    def __init__(self, momentum: float = 0.85, *, reset_on_task: bool = False) -> None:
        check_beta("momentum", momentum)
        self.momentum = momentum
        self.reset_on_task = reset_on_task

    @override
    def default_reducer(self) -> Reducer:
        return FedAvg(weighting="uniform")

    @override
    def init(self, params: Tensor) -> dict[str, Any]:
        return {"task": 0, "momentum": None}

    @override
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        trained = delta[: stats.num_params]
        momentum = server_momentum(self._momentum(state, stats.task), trained, self.momentum)
        trained.copy_(momentum)
        return delta, {"task": stats.task, "momentum": momentum}

    @override
    def broadcast(self, params: Tensor, state: Any, *, task: int) -> Tensor:
        momentum = self._momentum(state, task)
        return params if momentum is None else look_ahead(params, momentum, self.momentum)

    def _momentum(self, state: Any, task: int) -> Tensor | None:
        return None if self.reset_on_task and task != state["task"] else state["momentum"]
