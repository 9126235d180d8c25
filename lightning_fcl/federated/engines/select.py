"""Which engine drives which strategy."""

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.engines.replica import ReplicaEngine


def make_engine(fabric: Fabric, parallel: str, **settings: Any) -> Engine:
    """The engine for a launched Fabric.

    Args:
        fabric: Its strategy decides with ``parallel="model"``.
        parallel: ``"clients"`` or ``"model"``.
        settings: Passed to the engine.

    Returns:
        The engine, not set up yet.

    Raises:
        MisconfigurationError: If no engine drives the strategy.
    """
    if parallel == "clients":
        return ReplicaEngine(fabric, **settings)
    from lightning_fcl.federated.engines.strategy import StrategyEngine

    strategy = fabric.strategy
    if isinstance(strategy, DeepSpeedStrategy):
        from lightning_fcl.federated.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(fabric, **settings)
    if StrategyEngine.accepts(strategy):
        return StrategyEngine(fabric, **settings)
    if fabric.world_size == 1:
        return ReplicaEngine(fabric, **settings)
    raise MisconfigurationError(
        f"`parallel='model'` must be used with DDP, FSDP 2 (`strategy=fsdp2()`) or DeepSpeed, got "
        f"{type(strategy).__name__}."
    )
