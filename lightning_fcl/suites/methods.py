"""The table of methods that suites run: one line each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L

from lightning_fcl import aggregators as a
from lightning_fcl import callbacks as c
from lightning_fcl import mixins as m
from lightning_fcl.aggregators.base import Reducer, ServerStep
from lightning_fcl.aggregators.chain import Chain
from lightning_fcl.callbacks.base import ServerCallback


@dataclass(frozen=True, kw_only=True)
class Method:
    """What makes a method, new for every run.

    Args:
        aggregator: Reducer, server step or chain; by default what the callbacks bring, or ``FedAvg()``.
        callbacks: Client callbacks.
        server_callbacks: Server callbacks.
        mixins: Classes to put left of the suite's module.
        options: Their keyword arguments.
        data: ``"federated"``; ``"joint"``, ``"pooled"`` or ``"cumulative"`` for the stream's method of that name;
            ``"none"`` to evaluate without training.
    """

    aggregator: Reducer | ServerStep | Chain | None = None
    callbacks: list[L.Callback] = field(default_factory=list)
    server_callbacks: list[ServerCallback] = field(default_factory=list)
    mixins: tuple[type[L.LightningModule], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Literal["federated", "joint", "pooled", "cumulative", "none"] = "federated"


# To add a method, add a line. The key is its name in tables; the papers' rows below ours go by their own names.
METHODS: dict[str, Callable[[], Method]] = {
    # bounds
    "Zero-shot": lambda: Method(data="none"),
    "Fine-tuning": lambda: Method(data="pooled"),
    "Joint": lambda: Method(data="joint"),
    "FedAvg, all data so far": lambda: Method(data="cumulative"),
    # server
    "FedAvg": lambda: Method(aggregator=a.FedAvg()),
    "FedAvgM": lambda: Method(aggregator=a.FedAvgM(0.9, lr=0.3)),
    "FedAdam": lambda: Method(aggregator=a.FedAdam(0.01)),
    "FedYogi": lambda: Method(aggregator=a.FedYogi(0.01)),
    "FedAdagrad": lambda: Method(aggregator=a.FedAdagrad(0.03)),
    "FedExP": lambda: Method(aggregator=a.FedExP(1e-3)),
    "FedACG": lambda: Method(aggregator=a.FedACG(0.85), callbacks=[c.FedProx(0.002)]),
    "SWA": lambda: Method(aggregator=Chain(a.FedAvg(), a.WeightAverage(0.5))),
    "SPECIAL": lambda: Method(aggregator=a.ServerProximal(0.1)),
    "TSGA": lambda: Method(aggregator=a.TSGA("auto")),
    "Median": lambda: Method(aggregator=a.Median()),
    "Geometric Median": lambda: Method(aggregator=a.GeometricMedian()),
    # clients
    "FedProx": lambda: Method(callbacks=[c.FedProx(0.01)]),
    "SCAFFOLD": lambda: Method(callbacks=[c.SCAFFOLD("I")]),
    "FedDyn": lambda: Method(callbacks=[c.FedDyn(0.1)]),
    "FedCurv": lambda: Method(callbacks=[c.FedCurv(1.0)]),
    "FedSAM": lambda: Method(callbacks=[c.FedSAM(0.1)]),
    "FedASAM": lambda: Method(callbacks=[c.FedASAM(0.7, 0.2)]),
    "FedSOL": lambda: Method(callbacks=[c.FedSOL()]),
    "SPECIAL-C": lambda: Method(callbacks=[c.ClientProximal(0.2)]),
    "EWC": lambda: Method(callbacks=[c.EWC(1.0)]),  # more diverges on the suites' rates
    "SI": lambda: Method(callbacks=[c.SI(0.1)]),
    "GEM": lambda: Method(callbacks=[c.GEM(64)]),
    "A-GEM": lambda: Method(callbacks=[c.AGEM(64)]),
    # modules
    "LwF": lambda: Method(mixins=(m.LwF,)),
    "FLwF-2T": lambda: Method(mixins=(m.FLwF2T,)),
    "FedNTD": lambda: Method(mixins=(m.FedNTD,)),
    "FedLMD": lambda: Method(mixins=(m.FedLMD,)),
    "FedDecorr": lambda: Method(mixins=(m.FedDecorr,)),
    "FedGELA": lambda: Method(mixins=(m.FedGELA,)),
    "MOON": lambda: Method(mixins=(m.MOON,)),
    "FedADB": lambda: Method(mixins=(m.DualBranchMixin,), server_callbacks=[c.ClassAnchors()]),
}
"""What makes each method, by its name in tables; add a line to add a method to every suite."""
