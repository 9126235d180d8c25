"""Figures of the last task's rounds and of what moved, read from metrics.csv."""

import math

import pytest
import torch

from lightning_fcl.reports import FEDCMM, RunReport, event_figures, rounds_to_score


@pytest.fixture
def report(tmp_path):
    """Two tasks; in the second the mean over both goes 0.20, 0.48, 0.51, 0.49, 0.76, as in the oracle."""
    header = "global_round,task,round,phase,task/a/acc,task/b/acc,client/drift/vision,client/drift/vision_weighted"
    rows = ["0,0,0,train,0.9,0.9,,", "1,0,1,boundary,0.9,0.9,,"]
    for round, score in enumerate((0.20, 0.48, 0.51, 0.49, 0.76)):
        rows.append(f"{2 + round},1,{round},train,{score - 0.1},{score + 0.1},{0.1 * (round + 1)},")
    rows.append("7,1,5,boundary,0.99,0.99,,")
    (tmp_path / "metrics.csv").write_text("\n".join([header, *rows, ""]))
    matrix = torch.tensor([[0.9, 0.9], [0.66, 0.86]])
    return RunReport(run_dir=tmp_path, method="x", accuracy=matrix, names=["a", "b"], seed=0, score="acc")


def test_rounds_are_those_of_the_last_task(report):
    assert rounds_to_score(report, 0.5) == 3
    assert rounds_to_score(report, 0.75) == 5
    assert rounds_to_score(report, 0.8) is None
    assert rounds_to_score(report, 0.5, task=0) == 1


def test_drift_is_the_last_one_logged(report):
    figures = event_figures(report)
    assert (figures["rounds to 50"], figures["rounds to 75"]) == (3.0, 5.0)
    assert figures["drift vision"] == pytest.approx(0.5)
    assert math.isnan(figures["drift vision weighted"])
    assert math.isnan(figures["drift language"])


def test_papers_figures_are_those_of_the_paper():
    first, lagging = FEDCMM[1].rows, FEDCMM[4].rows
    assert first["FedCMM"] == pytest.approx({"acc": 0.863, "bwt": -0.087, "fwt": 0.020})
    assert first["FedAvg-CL, alpha 0.1"]["acc"] == pytest.approx(0.689)
    drops = {name: lagging[f"{name}, 30 % behind"]["acc"] - lagging[name]["acc"] for name in ("FedAvg-CL", "FedCMM")}
    assert drops == pytest.approx({"FedAvg-CL": -0.081, "FedCMM": -0.039})
