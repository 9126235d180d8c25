"""The five tables of FedCMM, on data that are not ours."""

from collections.abc import Mapping
from typing import Final

from lightning_fcl.reports.published import PublishedTable

_FEDCMM_DATA: Final = "PHEME, 7 events in 3 tasks; MiniCPM-V-2.6 with LoRA, 10 clients, 5 sampled, 50 rounds per task"


def _fedcmm(table: str, rows: Mapping[str, tuple[float, ...]]) -> PublishedTable:
    keys = ("acc", "bwt", "fwt")
    return PublishedTable(
        source=f"FedCMM, table {table}",
        url="https://arxiv.org/abs/2607.12112",
        data=_FEDCMM_DATA,
        rows={name: {key: value / 100 for key, value in zip(keys, row, strict=False)} for name, row in rows.items()},
    )


FEDCMM: Final = {
    1: _fedcmm(
        "I",
        {
            "Joint": (89.2,),
            "Fine-tuning": (68.4, -29.1, 0.4),
            "FedAvg-CL": (73.8, -22.7, 0.8),
            "FedProx-CL": (75.4, -20.9, 0.7),
            "LwF-FL": (77.1, -18.7, 1.2),
            "EWC-FL": (78.6, -16.8, 1.0),
            "GEM-FL": (83.2, -12.0, 1.9),
            "FedCMM": (86.3, -8.7, 2.0),
            "Joint, alpha 0.1": (89.2,),
            "Fine-tuning, alpha 0.1": (65.7, -32.4, 0.0),
            "FedAvg-CL, alpha 0.1": (68.9, -27.9, 0.4),
            "FedProx-CL, alpha 0.1": (70.2, -25.6, 0.5),
            "LwF-FL, alpha 0.1": (72.6, -23.5, 0.9),
            "EWC-FL, alpha 0.1": (74.9, -20.1, 0.8),
            "GEM-FL, alpha 0.1": (79.6, -14.5, 1.2),
            "FedCMM, alpha 0.1": (81.8, -12.6, 1.9),
        },
    ),
    2: _fedcmm(
        "II",
        {
            "FedAvg-CL": (73.8, -22.7, 0.8),
            "FedCMM without MA-EWC": (83.7, -10.9, 1.7),
            "FedCMM without PPFR": (82.4, -13.6, 1.6),
            "FedCMM without TSGA": (84.5, -9.5, 1.9),
            "FedCMM": (86.3, -8.7, 2.0),
        },
    ),
    3: _fedcmm(
        "III",
        {
            "FedCMM without MA-EWC": (82.8, -12.4, 1.5),
            "FedCMM, uniform EWC": (84.3, -10.9, 1.7),
            "FedCMM, vision only": (83.1, -11.7, 1.8),
            "FedCMM, language only": (83.9, -10.8, 1.5),
            "FedCMM": (86.3, -8.7, 2.0),
        },
    ),
    4: _fedcmm(
        "IV",
        {
            "FedAvg-CL": (73.8,),
            "EWC-FL": (78.6,),
            "FedCMM": (86.3,),
            "FedAvg-CL, 30 % behind": (65.7,),
            "EWC-FL, 30 % behind": (71.4,),
            "FedCMM, 30 % behind": (82.4,),
        },
    ),
    5: _fedcmm(
        "V (R50 / R75: 18 / -, 13 / 28, 8 / 13, - / -)",
        {
            "FedAvg-CL": (73.8,),
            "EWC-FL": (78.6,),
            "FedCMM": (86.3,),
            "Joint": (89.2,),
        },
    ),
}
"""Source: https://arxiv.org/abs/2607.12112, tables I to V, PHEME with Dirichlet 0.5 unless a row says otherwise."""
