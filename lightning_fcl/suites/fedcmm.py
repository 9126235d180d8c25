"""The methods of FedCMM's tables: its three parts, what is left without each, and what it is compared with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_fcl.aggregators import TSGA
from lightning_fcl.callbacks import EWC, GEM, EmbeddingReplay, FedProx, ModalityEWC
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.data import EventPosts, cue_posts, drawn_events, event_questions, load_event_folder
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.mixins import LwF
from lightning_fcl.mllm import EventInstructionModule
from lightning_fcl.models import EventClassifier, TwoTower, pretrain_towers

TITLES: Mapping[str, str] = {
    "joint": "Joint",
    "fine-tuning": "Fine-tuning",
    "fedavg": "FedAvg-CL",
    "fedprox": "FedProx-CL",
    "lwf": "LwF-FL",
    "ewc": "EWC-FL",
    "gem": "GEM-FL",
    "fedcmm": "FedCMM",
    "no-ewc": "FedCMM without MA-EWC",
    "no-replay": "FedCMM without PPFR",
    "no-tsga": "FedCMM without TSGA",
    "uniform": "FedCMM, uniform EWC",
    "vision": "FedCMM, vision only",
    "language": "FedCMM, language only",
    "auto": "FedCMM, auto",
    "auto-ewc": "FedCMM, auto strength",
    "auto-tsga": "FedCMM, auto threshold",
    "last": "FedCMM, last task only",
}
"""What tables call a method, by its name on the command line. ``auto``: strength of MA-EWC and threshold of TSGA set
themselves. ``last``: of the earlier tasks only the last is held on to and rehearsed, as in the paper."""
SYNC = (0.5, 0.0, "")
TABLES: dict[int, tuple[list[str], list[tuple[float, float, str]]]] = {
    1: (
        ["joint", "fine-tuning", "fedavg", "fedprox", "lwf", "ewc", "gem", "fedcmm"],
        [SYNC, (0.1, 0.0, ", alpha 0.1")],
    ),
    2: (["fedavg", "no-ewc", "no-replay", "no-tsga", "fedcmm"], [SYNC]),
    3: (["no-ewc", "uniform", "vision", "language", "fedcmm"], [SYNC]),
    4: (["fedavg", "ewc", "fedcmm"], [SYNC, (0.5, 0.3, ", 30 % behind")]),
    5: (["fedavg", "ewc", "fedcmm", "joint"], [SYNC]),
}
"""By table of the paper, the methods, and the settings: Dirichlet's alpha, share of clients behind, what tables say."""
_HELD: Mapping[str, tuple[str, ...]] = {"no-ewc": (), "vision": ("vision",), "language": ("language",)}
_MODALITIES = ("vision", "language", "projector")


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """How strong each part is; by default what was best on drawn posts with seeds that no table uses (10 to 12).

    Args:
        ewc: Of EWC-FL.
        vision: Of MA-EWC on the vision tower.
        language: Of MA-EWC on the language part.
        projector: Of MA-EWC on the projector.
        threshold: Of TSGA.
        replay: Weight of the rehearsal's loss.
        prox: Of FedProx-CL.
        lwf: Of LwF-FL's distillation.
        gem: Raw posts that a client of GEM-FL keeps per task; FedCMM rehearses as many embeddings.
    """

    ewc: float = 1000.0
    vision: float = 0.3
    language: float = 0.3
    projector: float = 0.3
    threshold: float | Literal["auto"] = 0.5
    replay: float = 3.0
    prox: float = 0.1
    lwf: float = 1.0
    gem: int = 100


class LwFEventClassifier(LwF, EventClassifier):
    """An :class:`~lightning_fcl.models.EventClassifier` that its older self teaches."""


def event_posts(folder: Path | None, *, ask: bool = False, small: bool = False) -> EventPosts:
    """Posts of seven events.

    Args:
        folder: Of real posts, see :func:`~lightning_fcl.data.load_event_folder`; ``None`` to draw them.
        ask: Make questions of them, in pictures of the size that LLaVA-like models read.
        small: Draw few.
    """
    if folder is not None:
        posts = load_event_folder(folder, size=224 if ask else 32)
    else:
        counts = (120, 40) if not small else (8, 2) if ask else (24, 8)
        posts = drawn_events(*counts, size=32 if ask else 16)
    return event_questions(posts) if ask else posts


def event_module(
    names: Sequence[str],
    *,
    model: str | Path | None = None,
    posts: int | None = 600,
    lr: float | None = None,
    lwf: float | None = None,
) -> EventClassifier | EventInstructionModule:
    """A new module that names events, and of events knows nothing.

    Args:
        names: Names of the events.
        model: Folder or hub id of a LLaVA-like model, which gets LoRA in vision, language and projector; without it, a
            classifier of two towers.
        posts: The classifier's towers learn to see and to read from so many drawn posts of no event; ``None`` for real
            posts, on which it starts untrained.
        lr: Learning rate of AdamW; by default 1e-3, or 2e-3 for LoRA in a LLaVA-like model.
        lwf: Strength of LwF; ``None`` for a module without it.

    Raises:
        MisconfigurationError: If LwF is asked of a LLaVA-like model, whose outputs are words and no classes.
    """
    if model is not None:
        if lwf is not None:
            raise MisconfigurationError(
                "`method` must not be lwf with a `model`, whose outputs are words, not classes."
            )
        options: dict[str, Any] = {"lr": 2e-3 if lr is None else lr, "max_new_tokens": 20}
        module: EventInstructionModule = EventInstructionModule.from_pretrained(model, names=names, **options)
        return module
    net = TwoTower() if posts else TwoTower(len(names), image_size=32, vocabulary=4096, rank=0)
    if posts:
        pretrain_towers(net, cue_posts(posts))
    lr = 1e-3 if lr is None else lr
    return EventClassifier(net, lr=lr) if lwf is None else LwFEventClassifier(net, lr=lr, lwf_strength=lwf)


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
    if method in ("joint", "fine-tuning", "fedavg", "lwf"):  # LwF is in the module
        return {}
    if method == "fedprox":
        return {"callbacks": [FedProx(strengths.prox)]}
    if method == "ewc":
        return {"callbacks": [EWC(strengths.ewc, log_likelihood=log_likelihood)]}
    if method == "gem":
        return {"callbacks": [GEM(strengths.gem)]}
    memory: Literal["all", "last"] = "last" if method == "last" else "all"
    parts: list[ContinualCallback] = []
    if held := _HELD.get(method, _MODALITIES):
        by_group = {name: getattr(strengths, name) if name in held else 0.0 for name in _MODALITIES}
        options: dict[str, Any] = {"memory": memory, "log_likelihood": log_likelihood}
        options["normalise"] = "global" if method == "uniform" else "per_group"
        parts.append(ModalityEWC("auto" if method in ("auto", "auto-ewc") else by_group, **options))
    if method != "no-replay":
        parts.append(EmbeddingReplay(strengths.replay, lr=3e-3, fit_batch_size=8, memory=memory))
    threshold = "auto" if method in ("auto", "auto-tsga") else strengths.threshold
    return {"callbacks": parts, **({} if method == "no-tsga" else {"aggregator": TSGA(threshold)})}
