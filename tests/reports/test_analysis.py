"""Curvature against a quadratic, rounds and classes from tables, and the command on a real run."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fcl import ClassAnchors, TaskStream
from lightning_fcl.callbacks import PerClassAccuracy, PersonalEvaluation
from lightning_fcl.cli import main
from lightning_fcl.models import image_classifier
from lightning_fcl.reports import RunReport, class_table, curve_figures, round_scores, speed_up
from lightning_fcl.reports.curvature import top_eigenvalues
from tests.helpers.toy import toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


def test_eigenvalues_of_a_quadratic():
    """0.5 sum h w^2 has the Hessian diag(h), whatever the batches."""

    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(3))

    def loss(module, curvature):
        return 0.5 * (curvature * module.w.square()).sum()

    first = torch.tensor([9.0, 1, 5, 2, 7, 3, 4, 6], dtype=torch.float64)
    values = top_eigenvalues(Weights(), loss, [(first, 3), (first + 4, 1)])  # mean over examples: plus 1
    assert values == pytest.approx([10, 8, 7, 6, 5])


def made(path, method, scores, seed=0):
    path.mkdir()
    rows = [f"{r},0,{r},train,{s},{c}" for r, (s, c) in enumerate(scores)]
    header = "global_round,task,round,phase,round/acc,task/x/class_1"
    (path / "metrics.csv").write_text("\n".join([header, *rows, "9,0,9,boundary,,", ""]))
    report = RunReport(run_dir=path, method=method, accuracy=torch.tensor([[0.5]]), names=["x"], seed=seed, score="acc")
    report.save()
    return report


def test_figures_of_a_curve(tmp_path):
    report = made(tmp_path / "a", "FedAvg", [(0.1, 0), (0.5, 0.5), ("", ""), (0.4, 0.5), (0.6, 0.0), (0.3, 0.0)])
    assert round_scores(report).nan_to_num(nan=-1).tolist() == [0.1, 0.5, -1, 0.4, 0.6, 0.3]
    labels, table = class_table(report)
    assert labels == [1]
    assert table.squeeze(1).tolist() == [0.0, 0.5, 0.5, 0.0, 0.0]
    figures = curve_figures(report, targets=[0.5, 0.9], smoothing=1.0)
    assert figures.pop("rounds to 0.9") != figures  # NaN: never
    assert figures == pytest.approx(
        {"top5": 0.38, "final": 0.3, "rounds to 0.5": 2, "oscillation": 0.25, "classes at zero": 0.6}
    )


def test_speed_up_over_the_last_method(tmp_path):
    slow = made(tmp_path / "a", "FedAvg", [(0.1, 0), (0.2, 0), (0.3, 0), (0.4, 0)])
    fast = made(tmp_path / "b", "FedADB", [(0.3, 0), (0.4, 0), (0.5, 0), (0.5, 0)])
    lines = speed_up([slow, fast], targets=[0.3, 0.4, 0.5], smoothing=1.0).splitlines()
    assert lines[1].split() == ["FedAvg", "3", "(3.0x)", "4", "(2.0x)", "-", "2.5x"]
    assert lines[2].split() == ["FedADB", "1", "(1.0x)", "2", "(1.0x)", "3", "(1.0x)", "1.0x"]


def tiny_images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = torch.rand(count, 1, 12, 12, generator=generator) - 1
    images[torch.arange(count), 0, 4 * labels] += 1  # the class is a bright row
    return TensorDataset(images, labels)


def tiny_stream() -> TaskStream:
    """Three clients with two classes each."""
    return TaskStream.from_datasets(
        [tiny_images(48, 0)], [tiny_images(24, 1)], clients=3, batch_size=8, partition="label_dirichlet", names=["x"]
    )


@pytest.fixture
def run_dir(tmp_path):
    from lightning_fcl._recipes import write_parts

    options = {"num_classes": 3, "size": 12, "dual": {"share_local": False}}
    callbacks = [PerClassAccuracy(), PersonalEvaluation()]
    trainer = toy_trainer(
        tmp_path / "run", server_callbacks=ClassAnchors(steps=5, gate=0), callbacks=callbacks, eval_every=1
    )
    torch.manual_seed(0)
    trainer.fit(image_classifier(**options), tiny_stream())
    write_parts(trainer, image_classifier, options, tiny_stream, {})
    return tmp_path / "run"


def test_the_command_draws_what_it_finds_into_the_report(run_dir, capsys):
    before = (run_dir / "metrics.csv").read_bytes()
    assert main(["analyse", str(run_dir), "--examples", "30", "--targets", "[0.2]"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("rounds to")
    assert '"anisotropy"' in printed
    pictures = {path.stem for path in (run_dir / "analysis").glob("*.png")}
    assert pictures == {"hessian", "features", "prototypes", "psnr"}
    numbers = json.loads((run_dir / "analysis" / "analysis.json").read_text())
    assert len(numbers["hessian"]["eigenvalues"]) == 5
    assert numbers["psnr"]["largest"] == max(row["closest"] for row in numbers["psnr"]["anchors"])
    page = (run_dir / "report.html").read_text()
    assert page.count("<img") == 2 + len(pictures)  # curves, classes
    assert "rounds to 0.2" in json.loads((run_dir / "figures.json").read_text())
    assert (run_dir / "metrics.csv").read_bytes() == before


def test_classes_and_clients_own_scores_are_logged(run_dir):
    report = RunReport.load(run_dir)
    labels, table = class_table(report)
    assert labels == [0, 1, 2]
    torch.testing.assert_close(table.mean(1), round_scores(report), atol=1e-6, rtol=0)  # classes of equal size
    from lightning_fcl.reports.files import read_table

    rows = read_table(run_dir / "metrics.csv")[1]
    assert all(0 <= float(row[f"client/personal_{head}"]) <= 1 for row in rows for head in ("global", "local"))
    assert (run_dir / "classes.png").is_file()


def test_what_is_missing_is_named(run_dir, capsys):
    (run_dir / "analyse.yaml").unlink()
    assert main(["analyse", str(run_dir), "--parts", "[psnr]"]) == 1
    assert "`parts_from` must name a YAML file with `model` and `stream`" in capsys.readouterr().err
    assert main(["analyse", str(run_dir), "--parts", "[rounds]"]) == 0
    with pytest.raises(SystemExit):
        main(["analyse", str(run_dir), "--parts", "[magic]"])
