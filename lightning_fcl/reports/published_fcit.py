"""FCIT's tables with DISCO, on data that are not ours."""

from collections.abc import Mapping
from typing import Final

from lightning_fcl.reports.published import PublishedTable

_FCIT_DATA: Final = (
    "ImageNet-R, ArxivQA, IconQA, CLEVR-Math, OCR-VQA, Flickr30k, FigureQA, super-CLEVR; LLaVA-1.5-7B with LoRA, 50 "
    "clients, 5 sampled, 10 rounds per stage, quantity skew 1"
)


def _fcit(table: str, rows: Mapping[str, tuple[float, ...]]) -> PublishedTable:
    keys = ("acc", "avg")  # Last is the mean score at the end
    return PublishedTable(
        source=f"FCIT, {table}",
        url="https://arxiv.org/abs/2503.12897",
        data=_FCIT_DATA,
        rows={name: {key: value / 100 for key, value in zip(keys, row, strict=False)} for name, row in rows.items()},
    )


FCIT: Final[Mapping[tuple[str, str], PublishedTable]] = {
    ("hom", "task"): _fcit(
        "homogeneous, task-related",
        {
            "Zero-shot": (29.08,),
            "Joint": (66.60,),
            "Finetune": (47.20, 68.79),
            "EWC": (47.92, 69.22),
            "O-LoRA": (49.87, 70.26),
            "M-LoRA": (48.53, 71.58),
            "MoELoRA": (49.02, 70.65),
            "DISCO": (56.22, 73.03),
        },
    ),
    ("het", "task"): _fcit(
        "heterogeneous, task-related",
        {
            "Finetune": (57.96, 54.22),
            "O-LoRA": (59.74, 55.20),
            "MoELoRA": (59.14, 54.69),
            "DISCO": (63.25, 61.99),
        },
    ),
    ("hom", "activation"): _fcit(
        "homogeneous, task-related, activation of the subspaces",
        {
            "DISCO, softmax": (56.22,),
            "DISCO, argmax": (55.74,),
            "DISCO, cosine": (52.83,),
            "DISCO, concatenation": (51.74,),
        },
    ),
    ("het", "activation"): _fcit(
        "heterogeneous, task-related, activation of the subspaces",
        {
            "DISCO, softmax": (63.25,),
            "DISCO, argmax": (62.88,),
            "DISCO, cosine": (60.92,),
            "DISCO, concatenation": (60.36,),
        },
    ),
}
"""By scenario and by what is compared. Source: https://arxiv.org/abs/2503.12897, beta 1."""
