"""Federated continual learning for people who already use Lightning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fcl.aggregators import TSGA as TSGA
    from lightning_fcl.aggregators import Chain as Chain
    from lightning_fcl.aggregators import FedACG as FedACG
    from lightning_fcl.aggregators import FedAdagrad as FedAdagrad
    from lightning_fcl.aggregators import FedAdam as FedAdam
    from lightning_fcl.aggregators import FedAvg as FedAvg
    from lightning_fcl.aggregators import FedAvgM as FedAvgM
    from lightning_fcl.aggregators import FedExP as FedExP
    from lightning_fcl.aggregators import FedYogi as FedYogi
    from lightning_fcl.aggregators import ServerProximal as ServerProximal
    from lightning_fcl.aggregators import SubspaceRouter as SubspaceRouter
    from lightning_fcl.aggregators import WeightAverage as WeightAverage
    from lightning_fcl.callbacks import AGEM as AGEM
    from lightning_fcl.callbacks import EWC as EWC
    from lightning_fcl.callbacks import GEM as GEM
    from lightning_fcl.callbacks import SCAFFOLD as SCAFFOLD
    from lightning_fcl.callbacks import SI as SI
    from lightning_fcl.callbacks import ClassAnchors as ClassAnchors
    from lightning_fcl.callbacks import ClientProximal as ClientProximal
    from lightning_fcl.callbacks import ContinualCallback as ContinualCallback
    from lightning_fcl.callbacks import EmbeddingReplay as EmbeddingReplay
    from lightning_fcl.callbacks import FaultInjector as FaultInjector
    from lightning_fcl.callbacks import FedASAM as FedASAM
    from lightning_fcl.callbacks import FedCurv as FedCurv
    from lightning_fcl.callbacks import FedDyn as FedDyn
    from lightning_fcl.callbacks import FedProx as FedProx
    from lightning_fcl.callbacks import FedSAM as FedSAM
    from lightning_fcl.callbacks import FedSOL as FedSOL
    from lightning_fcl.callbacks import ModalityEWC as ModalityEWC
    from lightning_fcl.callbacks import OLoRA as OLoRA
    from lightning_fcl.callbacks import RoundEarlyStopping as RoundEarlyStopping
    from lightning_fcl.callbacks import SaveSubspaces as SaveSubspaces
    from lightning_fcl.callbacks import ServerCallback as ServerCallback
    from lightning_fcl.data import PartitionPlan as PartitionPlan
    from lightning_fcl.data import TaskStream as TaskStream
    from lightning_fcl.federated.engines.fsdp2 import fsdp2 as fsdp2
    from lightning_fcl.federated.trainer import FederatedTrainer as FederatedTrainer
    from lightning_fcl.mixins import MOON as MOON
    from lightning_fcl.mixins import DualBranchMixin as DualBranchMixin
    from lightning_fcl.mixins import EmbeddingForwardMixin as EmbeddingForwardMixin
    from lightning_fcl.mixins import FedDecorr as FedDecorr
    from lightning_fcl.mixins import FedGELA as FedGELA
    from lightning_fcl.mixins import FedLMD as FedLMD
    from lightning_fcl.mixins import FedNTD as FedNTD
    from lightning_fcl.mixins import FLwF2T as FLwF2T
    from lightning_fcl.mixins import LossTermsMixin as LossTermsMixin
    from lightning_fcl.mixins import LwF as LwF
    from lightning_fcl.mixins import SubspaceRoutingMixin as SubspaceRoutingMixin
    from lightning_fcl.mllm import MultimodalInstructionModule as MultimodalInstructionModule
    from lightning_fcl.reports import RunReport as RunReport

# Names are looked up on first use, so that the command line can print its help without importing torch.
_HOMES = {
    "AGEM": "callbacks",
    "Chain": "aggregators",
    "ClassAnchors": "callbacks",
    "ClientProximal": "callbacks",
    "ContinualCallback": "callbacks",
    "DualBranchMixin": "mixins",
    "EWC": "callbacks",
    "EmbeddingForwardMixin": "mixins",
    "EmbeddingReplay": "callbacks",
    "FLwF2T": "mixins",
    "FaultInjector": "callbacks",
    "FedACG": "aggregators",
    "FedASAM": "callbacks",
    "FedAdagrad": "aggregators",
    "FedAdam": "aggregators",
    "FedAvg": "aggregators",
    "FedAvgM": "aggregators",
    "FedCurv": "callbacks",
    "FedDecorr": "mixins",
    "FedDyn": "callbacks",
    "FedExP": "aggregators",
    "FedGELA": "mixins",
    "FedLMD": "mixins",
    "FedNTD": "mixins",
    "FedProx": "callbacks",
    "FedSAM": "callbacks",
    "FedSOL": "callbacks",
    "FedYogi": "aggregators",
    "FederatedTrainer": "federated.trainer",
    "GEM": "callbacks",
    "LossTermsMixin": "mixins",
    "LwF": "mixins",
    "MOON": "mixins",
    "ModalityEWC": "callbacks",
    "MultimodalInstructionModule": "mllm",
    "OLoRA": "callbacks",
    "PartitionPlan": "data",
    "RoundEarlyStopping": "callbacks",
    "RunReport": "reports",
    "SCAFFOLD": "callbacks",
    "SI": "callbacks",
    "SaveSubspaces": "callbacks",
    "ServerCallback": "callbacks",
    "ServerProximal": "aggregators",
    "SubspaceRouter": "aggregators",
    "SubspaceRoutingMixin": "mixins",
    "TSGA": "aggregators",
    "TaskStream": "data",
    "WeightAverage": "aggregators",
    "fsdp2": "federated.engines.fsdp2",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_fcl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightning_fcl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
