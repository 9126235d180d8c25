"""Every recipe: it explains itself, it learns, and it says in one line what is wrong with its options."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fcl._recipes import chosen_methods, command_line, real_data
from lightning_fcl.exceptions import DatasetError, MisconfigurationError, ResumeMismatchError
from lightning_fcl.reports import SPECIAL_DIGIT10, RunReport

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {"train_tiny_llava"}  # it compares no methods
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py")) if path.stem not in TOOLS}
MOST_LINES = 150
DATA = Path(os.environ.get("FCL_DATA", "nowhere"))
COMMON = ("out", "seed", "method", "data_dir", "smoke")

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.fixture
def load(monkeypatch):
    """Loads a recipe as a module."""
    monkeypatch.delenv("FCL_DATA", raising=False)

    def load_recipe(name):
        spec = importlib.util.spec_from_file_location(name, RECIPES[name])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_recipe


@pytest.fixture
def command(load, monkeypatch, name):
    """Runs recipe ``name`` as its file does as a script, with options that must end it; gives what it ends with."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(SystemExit) as end:
            command_line(load(name).main)
        return str(end.value)

    return run


@pytest.fixture
def digits(load):
    return load("special_digits")


# -- all recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_is_short(name):
    assert len(RECIPES[name].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", RECIPES)
def test_help_explains_the_common_options(name):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, RECIPES[name], "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert not [option for option in COMMON if f"  --{option}" not in result.stdout]


@pytest.mark.parametrize("name", RECIPES)
def test_unknown_method_is_one_line_that_names_the_known_ones(command):
    error = command("--method", "magic")
    assert error.startswith("error: `method` must be all or one of ")
    assert error.endswith(", got 'magic'.")
    assert "\n" not in error


@pytest.mark.parametrize("name", RECIPES)
def test_missing_data_are_one_line_that_names_the_folder(command):
    error = command("--data-dir", "nowhere", "--smoke")
    assert re.match("error: `(path|data_dir)` must hold ", error)
    assert "'nowhere'" in error
    assert "\n" not in error


# -- special_digits ---------------------------------------------------------------------------------------------------


def test_all_methods_learn_and_are_compared(digits, tmp_path, capsys):
    figures = digits.main(out=tmp_path, smoke=True)
    assert list(figures) == [f"{name}-seed0" for name in ("fedavg", "fedavg-1i", "fedprox", "special-c", "special")]
    matrices = {name: RunReport.load(tmp_path / name).accuracy for name in figures}
    assert all(matrix.shape == (2, 2) and matrix[0, 0] > 0.8 for matrix in matrices.values())  # chance is 0.1
    first = matrices["special-seed0"][0, 0]  # there is nothing to hold on to in the first task
    assert all(matrices[name][0, 0] == first for name in ("fedavg-seed0", "fedavg-1i-seed0", "special-c-seed0"))
    assert figures["special-seed0"]["bwt"] > figures["fedavg-seed0"]["bwt"]
    printed = capsys.readouterr().out
    assert printed.count("method ") == 1
    assert "SPECIAL (paper)" in printed
    assert "theirs, on other data (USPS, SVHN, EMNIST, MNIST" in printed
    assert printed.endswith(f"report: {tmp_path / 'special-seed0' / 'report.html'}\n")
    assert (tmp_path / "special-seed0" / "report.html").is_file()


def test_second_call_returns_the_finished_runs_and_other_settings_are_refused(digits, tmp_path):
    options = {"out": tmp_path, "smoke": True, "method": "fedavg", "seed": 3}
    first = digits.main(**options)
    commits = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoints/**/*")}
    second = digits.main(**options, seeds=2)
    assert list(second) == ["fedavg-seed3", "fedavg-seed4"]
    assert second["fedavg-seed3"] == first["fedavg-seed3"] != second["fedavg-seed4"]
    assert commits.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoints/**/*")}.items()
    with pytest.raises(ResumeMismatchError, match=r"hparams.lr: 0.1 -> 0.2"):
        digits.main(**options, lr=0.2)


def test_strengths_have_folders_and_names_of_their_own(digits, tmp_path):
    figures = digits.main(out=tmp_path, smoke=True, method=["special"], strength=[0.5, 1e6])
    assert list(figures) == ["special-0.5-seed0", "special-1e+06-seed0"]
    report = RunReport.load(tmp_path / "special-1e+06-seed0")
    assert report.method == "SPECIAL 1e+06"
    torch.testing.assert_close(report.accuracy[1], report.accuracy[0], atol=0.01, rtol=0)  # frozen at the anchor


@pytest.mark.parametrize("net", ["small-bn", "lenet"])
def test_other_nets_and_treatments_of_batch_norm(digits, tmp_path, net):
    blend = digits.main(out=tmp_path / "blend", smoke=True, method="special", net=net)
    current = digits.main(out=tmp_path / "current", smoke=True, method="special", net=net, bn_stats="current")
    assert (blend == current) == (net == "lenet")  # only statistics of BatchNorm are treated differently


@pytest.mark.parametrize("net", ["small-bn", "resnet18"])
@pytest.mark.parametrize("examples", [33, 1])
def test_nets_with_batch_norm_train_on_what_a_client_may_have(digits, net, examples):
    """A lone example is dropped; should it be all a client has, the smallest maps still have a variance."""
    from lightning_fcl import TaskStream

    data = torch.utils.data.TensorDataset(torch.randn(examples, 1, 16, 16), torch.zeros(examples, dtype=torch.long))
    stream = TaskStream.domains({"one": (data, data)}, clients=1, batch_size=16, drop_last=True)
    model = digits.make_net(net, channels=1, size=16).train()
    sizes = [len(y) for x, y in stream.train_loader(0, 0) if model(x).isfinite().all()]
    assert sizes == ([16, 16] if examples == 33 else [1])


def test_data_are_found_by_the_environment(digits, monkeypatch, tmp_path):
    monkeypatch.setenv("FCL_DATA", "somewhere")
    with pytest.raises(DatasetError, match="somewhere"):
        digits.main(out=tmp_path, smoke=True)


def test_papers_figures_are_those_of_the_paper():
    assert SPECIAL_DIGIT10.rows["FedAvg"] == {"acc": 0.5869, "bwt": -0.4044, "worst_drop": -0.5473}
    assert SPECIAL_DIGIT10.rows["SPECIAL"]["acc"] - SPECIAL_DIGIT10.rows["FedAvg"]["acc"] == pytest.approx(0.0343)


# -- special_study ----------------------------------------------------------------------------------------------------


def test_study_writes_results_for_the_docs(load, tmp_path):
    study = load("special_study")
    assert study.main(out=tmp_path, smoke=True, method="batchnorm") == {"batchnorm": 3}
    results = json.loads((tmp_path / "special_digits_batchnorm.json").read_text())
    treatments = ["FedAvg, statistics blended", "SPECIAL 0.1, statistics blended", "SPECIAL 0.1, statistics left alone"]
    assert [run["method"] for run in results["runs"]] == treatments
    assert results["columns"] == ["acc", "bwt", "learned", "late gain", "clean", "inverted"]
    for figures in (run["summary"] for run in results["runs"]):
        assert figures["learned"] == pytest.approx(figures["acc"] - figures["bwt"] / 2)  # two tasks
        assert figures["acc"] == pytest.approx((figures["clean"] + figures["inverted"]) / 2)
    assert study.main(out=tmp_path, method="batchnorm", collect=True) == {"batchnorm": 3}


def test_late_gain_is_what_the_last_quarter_of_a_tasks_own_rounds_brought(load, tmp_path):
    rows = ["0,0,0,train,0.1", "1,0,1,train,0.5", "2,0,2,train,0.6", "3,0,3,train,0.9", "4,1,0,train,0.2"]
    (tmp_path / "metrics.csv").write_text("\n".join(["global_round,task,round,phase,task/x/acc", *rows, ""]))
    report = RunReport(
        run_dir=tmp_path, method="FedAvg", accuracy=torch.tensor([[0.9]]), names=["x"], seed=0, score="acc"
    )
    assert load("special_study").late_gain(report, 0) == pytest.approx(0.9 - 0.6)


def test_study_is_about_real_digits(load):
    with pytest.raises(DatasetError, match="`data_dir` must name the folder of real digits"):
        load("special_study").main()


# -- fedadb_images ----------------------------------------------------------------------------------------------------


def test_fedadb_runs_beside_fedavg(load, tmp_path, capsys):
    figures = load("fedadb_images").main(out=tmp_path, smoke=True, size=16, limit=400)
    assert list(figures) == ["fedavg-seed0", "fedadb-seed0"]
    printed = capsys.readouterr().out
    assert "rounds to" in printed
    assert printed.endswith(f"report: {tmp_path / 'fedadb-seed0' / 'report.html'}\n")
    for name in figures:
        assert json.loads((tmp_path / name / "figures.json").read_text())["final"] == figures[name]["final"]
        assert (tmp_path / name / "classes.png").is_file()
        assert (tmp_path / name / "analyse.yaml").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"method": "ablation", "weight": [0.1]},
        {"method": "stream", "tasks": 2, "alpha": 100.0},
        {"shift": "domain", "uint8": True, "warm_steps": 3},
        {"net": "resnet18", "method": "fedadb", "limit": 60},
    ],
)
def test_flags_of_fedadb(load, tmp_path, options):
    figures = load("fedadb_images").main(out=tmp_path, smoke=True, size=16, **{"limit": 400, **options})
    assert all(0 <= run["final"] <= 1 for run in figures.values())


@pytest.mark.slow
def test_fedadb_gives_missing_classes_a_voice(load, tmp_path):
    """Clients with few classes: in the same rounds its accuracy is far above FedAvg's."""
    figures = load("fedadb_images").main(out=tmp_path, size=16, rounds=12, epochs=5)
    assert figures["fedadb-seed0"]["final"] > figures["fedavg-seed0"]["final"] + 0.1


# -- fedcmm_events ----------------------------------------------------------------------------------------------------


def test_events_are_learned_by_methods_and_bounds(load, tmp_path, capsys):
    figures = load("fedcmm_events").main(out=tmp_path, smoke=True, method=["joint", "fine-tuning", "fedcmm"])
    folders = [
        f"{name}-alpha{alpha}-lag0.0-seed0" for alpha in (0.5, 0.1) for name in ("joint", "fine-tuning", "fedcmm")
    ]
    assert list(figures) == folders
    assert figures[folders[0]]["acc"] > 0.3  # chance is 0.14
    assert RunReport.load(tmp_path / folders[0]).accuracy.shape == (1, 3)
    printed = capsys.readouterr().out
    assert "FedCMM, alpha 0.1 (paper)" in printed
    assert "theirs, on other data (PHEME" in printed
    assert printed.endswith(f"report: {tmp_path / folders[-1] / 'report.html'}\n")
    saved = json.loads((tmp_path / folders[1] / "figures.json").read_text())
    assert saved["drift vision"] > 0
    assert saved["drift language weighted"] > 0  # fine-tuning has no importances: they are the drift's own
    assert saved["rounds to 75"] is None


@pytest.mark.slow
@pytest.mark.parametrize("table", [2, 3, 4, 5])
def test_all_tables_of_fedcmm(load, tmp_path, table):
    recipe = load("fedcmm_events")
    figures = recipe.main(out=tmp_path, smoke=True, table=table)
    methods, settings = recipe.TABLES[table]
    assert len(figures) == len(methods) * len(settings)
    reports = [RunReport.load(tmp_path / name) for name in figures]
    assert {report.method for report in reports} == set(recipe.FEDCMM[table].rows)


@pytest.mark.slow
def test_seven_tasks_of_one_event_and_strengths_that_set_themselves(load, tmp_path):
    figures = load("fedcmm_events").main(out=tmp_path, smoke=True, rounds=1, table=2, tasks=7, method=["auto", "last"])
    assert list(figures) == ["auto-alpha0.5-lag0.0-tasks7-seed0", "last-alpha0.5-lag0.0-tasks7-seed0"]
    report = RunReport.load(tmp_path / "auto-alpha0.5-lag0.0-tasks7-seed0")
    assert report.accuracy.shape == (7, 7)
    assert "client/ewc/vision" in (report.run_dir / "metrics.csv").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:fisher_diagonal runs sample by sample")
def test_a_language_model_names_the_events(load, tmp_path):
    pytest.importorskip("transformers")
    figures = load("fedcmm_events").main(out=tmp_path, smoke=True, rounds=1, table=2, method="fedcmm", model="tiny")
    run = tmp_path / "fedcmm-alpha0.5-lag0.0-seed0"
    assert figures[run.name]["drift projector weighted"] > 0
    assert "loss/replay" in (run / "metrics.csv").read_text()


@pytest.mark.skipif("FCL_DATA" not in os.environ, reason="set FCL_DATA to a folder that holds mediaeval_events")
def test_real_posts_are_also_scored_on_new_pictures(load, tmp_path):
    folder = DATA / "mediaeval_events"
    figures = load("fedcmm_events").main(out=tmp_path, smoke=True, method="fedavg", data_dir=folder)
    assert all(0 <= run["new pictures"] <= 1 for run in figures.values())


# -- add_to_lightning -------------------------------------------------------------------------------------------------


def test_one_line_keeps_the_first_task(load, tmp_path, capsys):
    figures = load("add_to_lightning").main(out=tmp_path)
    without, with_ewc = figures["no method"], figures["EWC"]
    assert without["first_before"] == with_ewc["first_before"] > 0.85
    assert without["bwt"] < -0.7  # nearly all is forgotten
    assert with_ewc["bwt"] > without["bwt"] + 0.3
    assert RunReport.load(tmp_path / "ewc").accuracy[1, 1] > 0.85  # and the second task is learned nevertheless
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'ewc' / 'report.html'}\n")


def test_the_line_is_one_line():
    assert RECIPES["add_to_lightning"].read_text().count("EWC(") == 1


# -- what recipes share -----------------------------------------------------------------------------------------------


def test_options_take_dashes_and_switches(monkeypatch):
    seen = {}

    def main(data_dir: Path | None = None, smoke: bool = False, strength: list[float] | None = None) -> None:
        """Note what came in."""
        seen.update(data_dir=data_dir, smoke=smoke, strength=strength)

    monkeypatch.setattr(sys, "argv", ["x", "--data-dir", "a-b", "--smoke", "--strength=[0.1, 2]"])
    command_line(main)
    assert seen == {"data_dir": Path("a-b"), "smoke": True, "strength": [0.1, 2.0]}


def test_methods_are_chosen_by_name():
    assert chosen_methods(["b", "a"], ["a", "b"]) == ["b", "a"]
    with pytest.raises(MisconfigurationError, match=r"`method` must be all or one of a, b, got 'c'\."):
        chosen_methods(["a", "c"], ["a", "b"])


def test_groups_of_methods_are_chosen_and_named():
    groups = {"all": ["a", "b"], "few": ["b"]}
    assert chosen_methods("few", ["a", "b", "c"], groups) == ["b"]
    with pytest.raises(MisconfigurationError, match=r"`method` must be all or one of few, a, b, c, got 'd'\."):
        chosen_methods("d", ["a", "b", "c"], groups)


def test_given_folder_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("FCL_DATA", "home")
    assert real_data(Path("mine"), "digits") == Path("mine")
    assert real_data(None, "digits") == Path("home/digits")
    monkeypatch.delenv("FCL_DATA")
    assert real_data(None, "digits") is None


# -- fcit_llava -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), [("activation", "magic"), ("source", "sound"), ("scenario", "both")])
def test_choices_of_fcit_are_named(load, monkeypatch, capsys, option, value):
    monkeypatch.setattr(sys, "argv", ["fcit_llava", f"--{option}", value])
    with pytest.raises(SystemExit) as end:
        command_line(load("fcit_llava").main)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert option in error
    assert value in error


@pytest.mark.slow
def test_fcit_ablates_the_activation_from_one_run(load, tmp_path, capsys):
    figures = load("fcit_llava").main(out=tmp_path, smoke=True, method="ablation", devices=1, max_new_tokens=4)
    others = [f"disco-seed0-{name}" for name in ("softmax", "argmax", "cosine", "concatenation")]
    assert list(figures) == ["disco-seed0", *others]
    assert figures["disco-seed0-softmax"]["last"] == pytest.approx(figures["disco-seed0"]["last"])
    saved = json.loads((tmp_path / "disco-seed0" / "figures.json").read_text())
    assert 0 <= saved["general"] <= 1
    assert saved["unseen before"] == figures["disco-seed0"]["unseen before"]
    printed = capsys.readouterr().out
    assert "2 subspaces for 2 tasks" in printed
    assert "DISCO, argmax (paper)" in printed
    assert "unseen before" in printed
    commits = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoints/**/*")}
    again = load("fcit_llava").main(out=tmp_path, smoke=True, method="ablation", devices=1, max_new_tokens=4)
    assert again["disco-seed0"] == figures["disco-seed0"]
    assert commits == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoints/**/*")}
