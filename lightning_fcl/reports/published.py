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
        "FedCIL": {"acc": 0.5095, "bwt": -0.2756, "worst_drop": -0.4114},
        "MFCL": {"acc": 0.6115, "bwt": -0.1958, "worst_drop": -0.2631},
        "SR-FDIL": {"acc": 0.6163, "bwt": -0.3638, "worst_drop": -0.5276},
        "pFedDIL": {"acc": 0.4617, "bwt": -0.2021, "worst_drop": -0.3386},
        "FLwF-2T": {"acc": 0.4739, "bwt": -0.3302, "worst_drop": -0.3860},
        "SPECIAL-C": {"acc": 0.5061, "bwt": -0.1642, "worst_drop": -0.2806},
        "SPECIAL": {"acc": 0.6212, "bwt": -0.2178, "worst_drop": -0.3437},
    },
)
"""Source: https://arxiv.org/abs/2601.22274, table 1 (Digit-10, M=8, N=4) and table 8 (worst earlier-task drop)."""

FEDADB_SILO: Final = PublishedTable(
    source="FedADB, table 1, cross-silo, mean of ten columns",
    url="https://doi.org/10.1145/3767308.3835615",
    data="SVHN, CINIC-10, CIFAR-10 at four levels of skew, CIFAR-100, OrganAMNIST, PathMNIST, TissueMNIST; ResNet-18 "
    "or LeNet, 20 clients, 4 sampled, 300 or 1000 rounds of 5 epochs",
    rows={
        "FedAvg": {"acc": 0.6000},
        "FedDyn": {"acc": 0.6003},
        "FedASAM": {"acc": 0.6242},
        "FedNTD": {"acc": 0.6112},
        "FedGELA": {"acc": 0.5763},
        "FedExP": {"acc": 0.6088},
        "FedLMD": {"acc": 0.6103},
        "FedDecorr": {"acc": 0.6050},
        "FedACG": {"acc": 0.5980},
        "FedSOL": {"acc": 0.6058},
        "FedADB": {"acc": 0.6713},
    },
)
"""Source: https://doi.org/10.1145/3767308.3835615, table 1 (K=20, participation 0.2), the column of means."""

FEDCMM_PHEME: Final = PublishedTable(
    source="FedCMM, table I, PHEME",
    url="https://arxiv.org/abs/2607.12112",
    data="posts and images on seven events in three tasks; MiniCPM-V with LoRA, 10 clients, 5 sampled, 50 rounds of "
    "one epoch, Dirichlet 0.5",
    rows={
        "Joint": {"acc": 0.892},
        "Fine-tuning": {"acc": 0.684, "bwt": -0.291, "fwt": 0.004},
        "FedAvg-CL": {"acc": 0.738, "bwt": -0.227, "fwt": 0.008},
        "FedProx-CL": {"acc": 0.754, "bwt": -0.209, "fwt": 0.007},
        "LwF-FL": {"acc": 0.771, "bwt": -0.187, "fwt": 0.012},
        "EWC-FL": {"acc": 0.786, "bwt": -0.168, "fwt": 0.010},
        "FedWeIT": {"acc": 0.804, "bwt": -0.149, "fwt": 0.015},
        "GEM-FL": {"acc": 0.832, "bwt": -0.120, "fwt": 0.019},
        "AF-FCL": {"acc": 0.841, "bwt": -0.109, "fwt": 0.018},
        "TEKNet-FL": {"acc": 0.846, "bwt": -0.102, "fwt": 0.023},
        "FedCMM": {"acc": 0.863, "bwt": -0.087, "fwt": 0.020},
    },
)
"""Source: https://arxiv.org/abs/2607.12112, table I, PHEME (0.5)."""
