"""Server optimisers: FedAvgM, FedAdam, FedYogi and FedAdagrad take the mean update as their gradient."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_positive
from lightning_fcl.aggregators.base import Reducer, RoundStats, ServerStep, StepSize, check_step_size, step_size
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.fedopt import adaptive_step, second_moment, server_momentum
from lightning_fcl.types import MethodCard

_ADAPTIVE = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
_ADAPTIVE_URL = "https://arxiv.org/abs/2003.00295"


def check_beta(name: str, beta: float, *, one: bool = False) -> None:
    """Raise unless a decay rate lies in [0, 1), or in [0, 1] with ``one``."""
    if not (0 <= beta < 1 or (one and beta == 1)):
        raise MisconfigurationError(f"`{name}` must lie in [0, 1{']' if one else ')'}, got {beta!r}.")


class FedAvgM(ServerStep):
    r"""FedAvg with momentum on the server.

    .. math:: m \leftarrow \beta m + \bar\Delta, \qquad \theta \leftarrow \theta + \eta_g m

    Float buffers (BatchNorm statistics) follow the mean without momentum.

    Args:
        momentum: :math:`\beta` in [0, 1); 0 is FedAvg.
        lr: :math:`\eta_g`: a number, ``"inverse_task"`` or a function of the task.
        ema: Average the deltas, :math:`m \leftarrow \beta m + (1 - \beta) \bar\Delta`, as OpenFedLLM does. A steady
            delta then moves the weights by itself, not by :math:`1 / (1 - \beta)` times as much.
        reset_on_task: Forget the momentum when a task begins.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Hsu, Qi & Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, sec. 4.3 (https://arxiv.org/abs/1909.06335).

    Deviation: None. No paper says what happens to the momentum at a task's end; it is kept by default.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedAvgM",
        acts_on="server",
        paper="Hsu, Qi & Brown, 2019",
        url="https://arxiv.org/abs/1909.06335",
        functions=("server_momentum",),
        smoke={"momentum": 0.9},
        neutral={"momentum": 0.0},
    )

    def __init__(
        self, momentum: float = 0.9, *, lr: StepSize = 1.0, ema: bool = False, reset_on_task: bool = False
    ) -> None:
        check_beta("momentum", momentum)
        check_step_size(lr)
        self.momentum = momentum
        self.lr = lr
        self.ema = ema
        self.reset_on_task = reset_on_task

    @override
    def init(self, params: Tensor) -> dict[str, Any]:
        return {"task": 0, "momentum": None}

    @override
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        fresh = self.reset_on_task and stats.task != state["task"]
        trained = delta[: stats.num_params]
        momentum = server_momentum(None if fresh else state["momentum"], trained, self.momentum, ema=self.ema)
        trained.copy_(momentum * step_size(self.lr, stats.task))
        return delta, {"task": stats.task, "momentum": momentum}


class _Adaptive(ServerStep):
    """What the three share: momentum, running squares, and the step made of both."""

    rule: ClassVar[Literal["adam", "yogi", "adagrad"]]

    def __init__(
        self,
        lr: StepSize = 0.01,
        *,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        reset_on_task: bool = False,
    ) -> None:
        check_step_size(lr)
        check_beta("beta1", beta1)
        check_beta("beta2", beta2, one=True)
        check_positive("tau", tau)
        self.lr = lr
        self.beta1 = beta1
        self.beta2 = beta2
        self.tau = tau
        self.reset_on_task = reset_on_task

    @override
    def default_reducer(self) -> Reducer:
        return FedAvg(weighting="uniform")

    @override
    def init(self, params: Tensor) -> dict[str, Any]:
        return {"task": 0, "momentum": None, "second": None}

    @override
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        trained = delta[: stats.num_params]
        momentum, second = state["momentum"], state["second"]
        if momentum is None or (self.reset_on_task and stats.task != state["task"]):
            momentum, second = torch.zeros_like(trained), torch.full_like(trained, self.tau**2)
        momentum = server_momentum(momentum, trained, self.beta1, ema=True)
        second = second_moment(second, trained, self.beta2, self.rule)
        trained.copy_(adaptive_step(momentum, second, step_size(self.lr, stats.task), self.tau))
        return delta, {"task": stats.task, "momentum": momentum, "second": second}


class FedAdam(_Adaptive):
    r"""Adam on the server: each weight moves by its own step size, whatever the length of the clients' deltas.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \bar\Delta, \quad
              v \leftarrow \beta_2 v + (1 - \beta_2) \bar\Delta^2, \quad
              \theta \leftarrow \theta + \eta_g \frac{m}{\sqrt{v} + \tau}

    Starts at :math:`m = 0, v = \tau^2`; there is no bias correction. Float buffers follow the mean.

    Args:
        lr: :math:`\eta_g`, in units of the weights, so it must be tuned for model and clients; a number,
            ``"inverse_task"`` or a function of the task.
        beta1: :math:`\beta_1` in [0, 1).
        beta2: :math:`\beta_2` in [0, 1].
        tau: :math:`\tau > 0`, outside of the root: deltas below it count little.
        reset_on_task: Start anew when a task begins.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295).

    Deviation: None with the default reducer, the paper's plain mean.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedAdam",
        acts_on="server",
        paper=_ADAPTIVE,
        url=_ADAPTIVE_URL,
        functions=("server_momentum", "second_moment", "adaptive_step"),
        smoke={"lr": 0.05},
    )
    rule = "adam"


class FedYogi(_Adaptive):
    r"""As :class:`FedAdam`, with squares that fall slowly after a burst.

    .. math:: v \leftarrow v - (1 - \beta_2) \bar\Delta^2 \operatorname{sign}(v - \bar\Delta^2)

    Args:
        lr: As in :class:`FedAdam`.
        beta1: As in :class:`FedAdam`.
        beta2: As in :class:`FedAdam`.
        tau: As in :class:`FedAdam`.
        reset_on_task: As in :class:`FedAdam`.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295).

    Deviation: None with the default reducer, the paper's plain mean.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedYogi",
        acts_on="server",
        paper=_ADAPTIVE,
        url=_ADAPTIVE_URL,
        functions=("server_momentum", "second_moment", "adaptive_step"),
        smoke={"lr": 0.05},
    )
    rule = "yogi"


class FedAdagrad(_Adaptive):
    r"""As :class:`FedAdam`, with squares that only add up: steps shrink, and a long stream of tasks freezes.

    .. math:: v \leftarrow v + \bar\Delta^2, \qquad \theta \leftarrow \theta + \eta_g \frac{m}{\sqrt{v} + \tau}

    Args:
        lr: As in :class:`FedAdam`.
        beta1: As in :class:`FedAdam`; 0, which makes :math:`m` the mean delta, is what the paper runs.
        tau: As in :class:`FedAdam`.
        reset_on_task: Start anew when a task begins, so that later tasks can move.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295).

    Deviation: None with the default reducer, the paper's plain mean.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedAdagrad",
        acts_on="server",
        paper=_ADAPTIVE,
        url=_ADAPTIVE_URL,
        functions=("server_momentum", "second_moment", "adaptive_step"),
        smoke={"lr": 0.05},
    )
    rule = "adagrad"

    def __init__(
        self, lr: StepSize = 0.01, *, beta1: float = 0.0, tau: float = 1e-3, reset_on_task: bool = False
    ) -> None:
        super().__init__(lr, beta1=beta1, tau=tau, reset_on_task=reset_on_task)
