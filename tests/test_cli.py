"""The command line: help without torch, runs from a file and there again, exit codes, one line per mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_fcl.cli import main
from tests.helpers.reports import Page

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
trainer:
  rounds: 2
  clients_per_round: 2
  eval_every: 1
  accelerator: cpu
  devices: 1
  run_dir: run
  aggregator:
    class_path: lightning_fcl.aggregators.ServerProximal
    init_args:
      strength: 0.1
  callbacks:
    - class_path: lightning_fcl.callbacks.FedProx
      init_args:
        strength: 0.01
  server_callbacks:
    - class_path: lightning_fcl.callbacks.RoundEarlyStopping
      init_args:
        monitor: round/val_acc
        patience: 9
model:
  class_path: tests.helpers.toy.ToyModule
  init_args:
    lr: 0.2
stream:
  class_path: tests.helpers.cli_parts.small_stream
  init_args:
    clients: 3
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])  # `fit` adds the working folder


@pytest.fixture
def config(tmp_path):
    (tmp_path / "x.yaml").write_text(CONFIG)
    return tmp_path / "x.yaml"


@pytest.fixture
def fcl(capfd):
    """Runs a command; returns its exit code, what it printed, and the lines on standard error."""

    def run(*words):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, err.splitlines()

    return run


@pytest.fixture
def finished(config, fcl):
    assert fcl("fit", "--config", config)[0] == 0
    return config.parent / "run"


def scores(folder):
    return json.loads((folder / "report.json").read_text())["accuracy"], (folder / "metrics.csv").read_bytes()


@pytest.mark.parametrize("words", [["--help"], ["report", "--help"], ["compare", "--help"]])
def test_help_imports_no_torch(words):
    code = f"""
import json, sys
from lightning_fcl.cli import main
try:
    main({words})
except SystemExit as stop:
    assert not stop.code
print(json.dumps(sorted(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *text, loaded = run.stdout.splitlines()
    assert text[0].startswith("usage: lightning-fcl")
    assert {"torch", "lightning", "numpy", "matplotlib"} & set(json.loads(loaded)) == set()


def test_fit_trains_and_prints_the_table_and_where_the_page_is(config, fcl):
    code, out, err = fcl("fit", "--config", config)
    assert code == 0
    assert out.splitlines()[0] == "SPECIAL + FedProx, seed 0: val_acc in %"
    assert out.splitlines()[-1] == "report: run/report.html"
    assert len(err) == 4  # rounds
    settings = yaml.safe_load((config.parent / "run" / "config.yaml").read_text())
    assert settings["trainer"]["aggregator"][0]["init_args"]["strength"] == 0.1
    assert settings["model"]["init_args"]["lr"] == 0.2
    assert settings["stream"]["clients"] == 3


def test_options_on_the_command_line_win(config, fcl):
    options = ["--trainer.rounds", 1, "--model.lr", 0.3, "--stream.tasks", 3, "--trainer.run_dir", "other"]
    code, _, err = fcl("fit", "--config", config, *options)
    assert (code, len(err)) == (0, 3)
    settings = yaml.safe_load((config.parent / "other" / "config.yaml").read_text())
    assert settings["model"]["init_args"]["lr"] == 0.3


def test_rules_may_be_a_list_and_data_sets_named_one_by_one(tmp_path, fcl):
    content = yaml.safe_load(CONFIG)
    content["trainer"]["aggregator"] = [
        {"class_path": "lightning_fcl.aggregators.FedAvg"},
        {"class_path": "lightning_fcl.aggregators.ServerProximal", "init_args": {"strength": 0.5}},
    ]
    blobs = [{"class_path": "tests.helpers.cli_parts.blobs", "init_args": {"seed": seed}} for seed in range(4)]
    content["stream"] = {
        "class_path": "lightning_fcl.data.TaskStream.from_datasets",
        "init_args": {
            "train": blobs[:2],
            "test": blobs[2:],
            "clients": 3,
            "partition": {"class_path": "lightning_fcl.data.LabelDirichlet", "init_args": {"alpha": 0.3}},
        },
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    assert fcl("fit", "--config", tmp_path / "x.yaml")[0] == 0
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    paths = [rule["class_path"].rpartition(".")[2] for rule in settings["trainer"]["aggregator"]]
    assert paths == ["FedAvg", "ServerProximal"]
    assert settings["stream"]["partition"].startswith("LabelDirichlet(alpha=0.3")


def test_settings_of_mixins_are_arguments_of_the_module(config, fcl):
    taught = ["--model", "tests.helpers.cli_parts.Taught", "--model.lwf_strength", "0.5", "--model.ntd_strength", "2"]
    code, out, _ = fcl("fit", "--config", str(config), *taught)
    assert code == 0
    assert "SPECIAL + FedProx + LwF + FedNTD" in out
    kept = yaml.safe_load(Path("run/fit.yaml").read_text())["model"]["init_args"]
    assert {"lr": 0.2, "lwf_strength": 0.5, "ntd_strength": 2.0, "lwf_temperature": 2.0}.items() <= kept.items()
    code, _, error = fcl("fit", "--config", str(config), *taught, "--model.ntd_strength", "1", "--ckpt_path", "last")
    assert code == 1
    assert "ntd_strength: 2.0 -> 1.0" in error[-1]


def test_a_printed_configuration_loads_back_to_the_same_run(config, fcl, finished):
    extra = ["--trainer.callbacks+=lightning_fcl.callbacks.EWC", "--trainer.callbacks.strength=3.0"]
    for options in ([], extra):
        code, printed, _ = fcl("fit", "--config", config, *options, "--print_config")
        assert code == 0
        (config.parent / "printed.yaml").write_text(printed)
        again = fcl("fit", "--config", "printed.yaml", "--print_config")[1]
        assert yaml.safe_load(again) == yaml.safe_load(printed)
    callbacks = yaml.safe_load(printed)["trainer"]["callbacks"]
    assert [callback["init_args"]["strength"] for callback in callbacks] == [0.01, 3.0]
    assert fcl("fit", "--config", config, *extra, "--trainer.run_dir", "long")[0] == 0
    assert fcl("fit", "--config", "printed.yaml", "--trainer.run_dir", "short")[0] == 0
    assert scores(config.parent / "long") == scores(config.parent / "short") != scores(finished)


def test_the_run_folder_repeats_the_run(fcl, finished):
    assert fcl("fit", "--config", finished / "fit.yaml", "--trainer.run_dir", "again")[0] == 0
    assert scores(finished.parent / "again") == scores(finished)


def test_an_interrupted_run_resumes_to_the_same_scores(config, fcl, finished):
    stop = ["--trainer.server_callbacks+=tests.helpers.cli_parts.StopOnce", "--trainer.server_callbacks.global_round=3"]
    words = ["fit", "--config", config, "--trainer.run_dir=cut", *stop, "--trainer.server_callbacks.done=done"]
    code, out, err = fcl(*words)
    assert (code, out, err[-1]) == (130, "", "lightning-fcl fit: interrupted")
    assert not (config.parent / "cut" / "report.json").exists()
    assert fcl(*words, "--ckpt_path", "last")[0] == 0
    assert scores(config.parent / "cut") == scores(finished)


def test_a_run_is_never_overwritten(config, fcl, finished):
    before = (finished / "fit.yaml").read_bytes(), scores(finished)
    code, out, err = fcl("fit", "--config", config, "--trainer.rounds", 5)
    assert (code, out) == (1, "")
    assert len(err) == 1
    assert err[0].startswith("lightning-fcl fit: `run_dir` 'run' already holds a run. Resume it with")
    assert ((finished / "fit.yaml").read_bytes(), scores(finished)) == before


def test_modules_in_the_working_folder_are_found(config, fcl):
    (config.parent / "my_data_of_test_cli.py").write_text(
        "from lightning_fcl.data import TaskStream\nfrom tests.helpers.toy import toy_stream\n"
        "def mine() -> TaskStream:\n    return toy_stream(tasks=1)\n"
    )
    assert fcl("fit", "--config", config, "--stream=my_data_of_test_cli.mine")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "lightning-fcl: the following arguments are required: COMMAND"),
        (["train"], "lightning-fcl: argument COMMAND: invalid choice: 'train'"),
        (["fit"], "lightning-fcl fit: the following arguments are required: trainer.rounds, trainer.clients_per_round"),
        (["fit", "--config", "nowhere.yaml"], 'lightning-fcl fit: Parser key "config": File does not exist'),
        (["fit", "--config", "x.yaml", "--trainer.rounds", "two"], 'lightning-fcl fit: Parser key "trainer.rounds"'),
        (["fit", "--config", "x.yaml", "--trainer.roundz", "2"], "lightning-fcl fit: unrecognized arguments"),
        (["fit", "--config", "x.yaml", "--model", "torch.nn.Linear"], 'lightning-fcl fit: Parser key "model"'),
        (["fit", "--config", "x.yaml", "--stream.tsks", "2"], 'lightning-fcl fit: Parser key "stream"'),
        (["report"], "lightning-fcl report: the following arguments are required: run_dir"),
        (["report", "nowhere"], "lightning-fcl report: `run_dir` must hold report.json, got 'nowhere'"),
        (["compare"], "lightning-fcl compare: the following arguments are required: run_dirs, or --suite and --out."),
        (["compare", "--suite", "special"], "lightning-fcl compare: `--suite` must come with --out, its folder"),
        (
            ["compare", "--suite", "x", "--out", "y"],
            "lightning-fcl compare: `--suite` must be one of fedadb, special, fedcmm",
        ),
        (["compare", "nowhere"], "lightning-fcl compare: `run_dirs` must hold report.json, got 'nowhere'"),
    ],
)
def test_a_usage_error_is_one_line_and_code_2(config, fcl, words, message):
    code, out, err = fcl(*words)
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith(message)
    assert err[0].endswith("--help")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--trainer.local_epochs=0", "lightning-fcl fit: `local_epochs` must be at least 1, got 0."),
        ("--trainer.server_callbacks.patience=0", "lightning-fcl fit: `patience` must be at least 1, got 0."),
        ("--stream.clients=1000", "lightning-fcl fit: `train[0]` must hold at least"),
        ("--trainer.score=nothing", "lightning-fcl fit: "),
    ],
)
def test_a_refusal_of_the_library_is_one_line_and_code_1(config, fcl, option, message):
    code, out, err = fcl("fit", "--config", config, option)
    assert (code, out, len(err)) == (1, "", 1)
    assert err[0].startswith(message)


def test_errors_of_the_users_own_code_come_out_as_they_are(config, fcl):
    with pytest.raises(ZeroDivisionError, match="cannot divide 1 by nothing"):
        fcl("fit", "--config", config, "--trainer.server_callbacks=tests.helpers.cli_parts.Refuses")


def test_report_draws_anew_and_prints_the_table(fcl, finished):
    page = (finished / "report.html").read_text()
    for name in ("report.html", "accuracy.png", "curves.png"):
        (finished / name).unlink()
    code, out, err = fcl("report", "run")
    assert (code, err) == (0, [])
    assert out.splitlines()[0] == "SPECIAL + FedProx, seed 0: val_acc in %"
    assert out.splitlines()[-1] == "report: run/report.html"
    assert (finished / "report.html").read_text() == page
    assert (finished / "curves.png").stat().st_size > 1000


def test_compare_prints_and_writes(config, fcl, finished):
    assert fcl("fit", "--config", config, "--trainer.run_dir=run1", "--trainer.seed=1")[0] == 0
    code, out, err = fcl("compare", finished, "run1", "--out", "both")
    assert (code, err) == (0, [])
    assert out.splitlines()[2].split()[:5] == ["SPECIAL", "+", "FedProx", "0,", "1"]
    assert out.splitlines()[-1] == "comparison: both/comparison.html"
    Page((config.parent / "both" / "comparison.html").read_text()).assert_self_contained()
    assert fcl("compare", ".")[1] == out.replace("comparison: both/comparison.html\n", "")


def test_a_place_that_cannot_be_written_is_one_line_and_code_1(config, fcl, finished):
    code, _, err = fcl("compare", finished, "--out", config / "inside")
    assert (code, len(err)) == (1, 1)
    assert "cannot write" in err[0]
