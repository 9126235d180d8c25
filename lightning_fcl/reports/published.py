"""Figures that papers print, to stand beside tables of our own: theirs, on their data, and labelled so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """One table of a paper.

    Args:
        source: Paper and table.
        url: Link to the paper.
        data: What they trained on, since it is never quite what we train on.
        rows: By method, as our reports name it: figures with the keys of :attr:`RunReport.summary`, as fractions.
    """

    source: str
    url: str
    data: str
    rows: Mapping[str, Mapping[str, float]]


SPECIAL_DIGIT10: Final = PublishedTable(
    source="SPECIAL, tables 1 and 8",
    url="https://arxiv.org/abs/2601.22274",
    data="USPS, SVHN, EMNIST, MNIST; ResNet-18, 8 clients, 4 sampled, 20 rounds of 5 epochs, Dirichlet 0.1, 3 seeds",
    rows={
        "FedAvg": {"acc": 0.5869, "bwt": -0.4044, "worst_drop": -0.5473},
        "FedProx": {"acc": 0.5899, "bwt": -0.3019, "worst_drop": -0.5260},
        "SPECIAL-C": {"acc": 0.5061, "bwt": -0.1642, "worst_drop": -0.2806},
        "SPECIAL": {"acc": 0.6212, "bwt": -0.2178, "worst_drop": -0.3437},
    },
)
"""Source: https://arxiv.org/abs/2601.22274, table 1 (Digit-10, M=8, N=4) and table 8 (worst earlier-task drop)."""
