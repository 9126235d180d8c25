"""The methods of FedCMM's tables: its three parts, what is left without each, and what it is compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lightning_fcl.aggregators import TSGA
from lightning_fcl.callbacks import EWC, EmbeddingReplay, FedProx, ModalityEWC
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.exceptions import MisconfigurationError

TITLES: Mapping[str, str] = {
    "joint": "Joint",
    "fine-tuning": "Fine-tuning",
    "fedavg": "FedAvg-CL",
    "fedprox": "FedProx-CL",
    "ewc": "EWC-FL",
    "fedcmm": "FedCMM",
    "no-ewc": "FedCMM without MA-EWC",
    "no-replay": "FedCMM without PPFR",
    "no-tsga": "FedCMM without TSGA",
    "uniform": "FedCMM, uniform EWC",
    "vision": "FedCMM, vision only",
    "language": "FedCMM, language only",
}
"""What tables call a method, by its name on the command line."""
_HELD: Mapping[str, tuple[str, ...]] = {"no-ewc": (), "vision": ("vision",), "language": ("language",)}
_MODALITIES = ("vision", "language", "projector")


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """How strong each part is.

    Args:
        ewc: Of EWC-FL.
        vision: Of MA-EWC on the vision tower.
        language: Of MA-EWC on the language part.
        projector: Of MA-EWC on the projector.
        threshold: Of TSGA.
        replay: Weight of the rehearsal's loss.
        prox: Of FedProx-CL.
    """

    ewc: float = 100.0
    vision: float = 0.03
    language: float = 0.03
    projector: float = 0.03
    threshold: float | Literal["auto"] = 0.5
    replay: float = 1.0
    prox: float = 0.1


def fedcmm_rules(
    method: str,
    log_likelihood: Callable[[Any, Any], Tensor],
    strengths: Strengths = Strengths(),
) -> dict[str, Any]:
    """What a method adds to the trainer's arguments.

    Args:
        method: A name of ``TITLES``.
        log_likelihood: Of the module, for the Fisher.
        strengths: Of its parts.

    Raises:
        MisconfigurationError: If the name is unknown.
    """
    if method not in TITLES:
        raise MisconfigurationError(f"`method` must be one of {', '.join(TITLES)}, got {method!r}.")
    if method in ("joint", "fine-tuning", "fedavg"):
        return {}
    if method == "fedprox":
        return {"callbacks": [FedProx(strengths.prox)]}
    if method == "ewc":
        return {"callbacks": [EWC(strengths.ewc, log_likelihood=log_likelihood)]}
    parts: list[ContinualCallback] = []
    if held := _HELD.get(method, _MODALITIES):
        by_group = {name: getattr(strengths, name) if name in held else 0.0 for name in _MODALITIES}
        normalise: Literal["global", "per_group"] = "global" if method == "uniform" else "per_group"
        parts.append(ModalityEWC(by_group, normalise=normalise, log_likelihood=log_likelihood))
    if method != "no-replay":
        parts.append(EmbeddingReplay(strengths.replay, lr=3e-3, fit_batch_size=8))
    return {"callbacks": parts, **({} if method == "no-tsga" else {"aggregator": TSGA(strengths.threshold)})}
