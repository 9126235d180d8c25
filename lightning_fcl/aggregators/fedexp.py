"""FedExP: the server extrapolates along the mean update while the clients disagree."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount
from lightning_fcl.aggregators.base import Reducer, RoundStats, ServerStep
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.fedexp import extrapolation
from lightning_fcl.functional.mean import delta_dot
from lightning_fcl.types import MethodCard


class FedExP(ServerStep):
    r"""FedAvg with a step size of the server that is set anew in each round.

    .. math:: \eta_g = \max\left\{1, \frac{\sum_k p_k \|\Delta_k\|^2}{2 (\|\bar\Delta\|^2 + \epsilon)}\right\},
              \qquad \theta \leftarrow \theta + \eta_g \bar\Delta

    The weights swing from round to round, so what is evaluated is the mean of the last two rounds' weights; training
    goes on from the last. The :math:`p_k` are those of the reducer. Float buffers follow the mean delta, by steps of 1.
    The round's step size is logged as ``round/extrapolation``.

    Args:
        epsilon: :math:`\epsilon \ge 0`, in units of a squared delta; the larger, the nearer to FedAvg. The authors use
            .001, and .1 for EMNIST.
        lr_decay: The clients' learning rate falls by this factor per round; :math:`\epsilon` then falls by its square.
        average: Whether to evaluate the mean of the last two rounds.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Jhunjhunwala, Wang & Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023,
    Algorithm 1 (https://arxiv.org/abs/2301.09604).

    Deviation: None with the default reducer, the paper's plain mean; the authors' code weighs by examples, as
    ``Chain(FedAvg(), FedExP())`` does.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedExP",
        acts_on="server",
        paper="Jhunjhunwala, Wang & Joshi, ICLR 2023",
        url="https://arxiv.org/abs/2301.09604",
        functions=("extrapolation", "delta_dot"),
        smoke={"epsilon": 0.0},
        neutral={"epsilon": 1e12, "average": False},
    )
    uses_square_norms = True

    def __init__(self, epsilon: float = 1e-3, *, lr_decay: float = 1.0, average: bool = True) -> None:
        check_amount("epsilon", epsilon)
        if not 0 < lr_decay <= 1:
            raise MisconfigurationError(f"`lr_decay` must lie in (0, 1], got {lr_decay!r}.")
        self.epsilon = epsilon
        self.lr_decay = lr_decay
        self.average = average

    @override
    def default_reducer(self) -> Reducer:
        return FedAvg(weighting="uniform")

    @override
    def init(self, params: Tensor) -> dict[str, Any]:
        return {"rounds": 0, "before": None}

    @override
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        trained = delta[: stats.num_params]
        epsilon = self.epsilon * self.lr_decay ** (2 * state["rounds"])
        square_norm = delta_dot(trained)
        factor = extrapolation(stats.square_norms, stats.weights, square_norm, epsilon)
        stats.logs["round/extrapolation"] = factor
        if factor != 1.0:
            trained.mul_(factor)
        return delta, {"rounds": state["rounds"] + 1, "before": params.clone() if self.average else None}

    @override
    def output(self, params: Tensor, state: Any) -> Tensor:
        before: Tensor | None = state["before"]
        return params if before is None else (params.double() + before.double()) / 2
