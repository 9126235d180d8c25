"""``lightning-fcl doctor``: exit codes, one line per mistake, the same configuration as ``fit``."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from lightning_fcl.cli import main
from lightning_fcl.models import TINY_LLAVA

CONFIG = {
    "trainer": {"rounds": 2, "clients_per_round": 2, "accelerator": "cpu", "devices": 1, "run_dir": "run"},
    "model": {"class_path": "tests.helpers.toy.ToyModule", "init_args": {"lr": 0.2}},
    "stream": {"class_path": "tests.helpers.cli_parts.small_stream", "init_args": {"clients": 3}},
}


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.fixture
def doctor(capfd, tmp_path):
    """Runs the command on a configuration; returns exit code, what was printed, and lines on standard error."""

    def run(content, *words):
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
        config = ["--config", str(tmp_path / "x.yaml")] if content else []
        try:
            code = main(["doctor", *config, *words])
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, err.splitlines()

    return run


def test_a_configuration_that_is_well(doctor):
    code, out, err = doctor(CONFIG, "--link_mbit", "10", "250")
    assert (code, err) == (0, [])
    titles = [part.splitlines()[0] for part in out.split("\n\n")]
    assert titles == [
        "parameters",
        "traffic",
        "links",
        "memory of one process, without activations",
        "disk",
        "time on this machine, without sending and boundary passes",
        "checks",
    ]
    assert "250 Mbit/s" in out
    assert "note     engine: ReplicaEngine, 1 process(es)" in out
    assert not Path("run").exists()


def test_the_options_of_fit_are_taken(doctor):
    assert doctor(CONFIG, "--trainer.rounds", "7", "--ckpt_path", "auto")[1].count("the run: 14 rounds") == 1


def test_what_is_wrong_gives_exit_code_1(doctor):
    code, out, _ = doctor(CONFIG, "--model.lr", "1e38")
    assert code == 1
    assert "error    dry run, " in out


def test_a_constructor_that_fails(doctor):
    broken = {**CONFIG, "trainer": {**CONFIG["trainer"], "server_callbacks": ["tests.helpers.cli_parts.Refuses"]}}
    code, out, _ = doctor(broken)
    assert code == 1
    assert "error    making the objects of the configuration: ZeroDivisionError: cannot divide 1 by nothing" in out


@pytest.mark.parametrize("missing", ["stream", "model"])
def test_a_part_that_is_missing_is_named_in_one_line(doctor, missing):
    code, out, err = doctor({name: part for name, part in CONFIG.items() if name != missing})
    assert (code, out, len(err)) == (2, "", 1)
    assert missing in err[0]


def test_speeds_that_are_none(doctor):
    code, _, err = doctor(CONFIG, "--link_mbit", "0")
    assert (code, err) == (1, ["lightning-fcl doctor: `link_mbit` must hold positive speeds, got 0.0."])


def test_an_estimate_from_config_json(doctor):
    code, out, _ = doctor(None, "--estimate", str(TINY_LLAVA), "--devices", "4", "--lora.rank", "2", "--rounds", "20")
    assert code == 0
    assert "trained, travels" in out
    assert f"{36_864 // 4:,}" in out
    assert "ZeRO-3, each of 4 ranks" in out
    assert "20 rounds of 5" in out


def test_an_estimate_of_nothing(doctor, tmp_path):
    code, _, err = doctor(None, "--estimate", str(tmp_path))
    assert (code, len(err)) == (1, 1)
    assert "`path` must be a folder with a model and its processor" in err[0]


def test_the_page_shows_what_the_command_prints(doctor):
    """All but what depends on machine and versions: memory, disk and time."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "doctor.md").read_text()
    config = re.search(r"^```yaml config\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    shown = re.search(r"<!-- output: doctor -->\n```text\n(.*?)\n```", page, re.DOTALL)[1].split("\n\n")
    code, out, _ = doctor(yaml.safe_load(config))
    said = out.strip().split("\n\n")
    assert code == 0
    assert [part.partition("\n")[0] for part in said] == [part.partition("\n")[0] for part in shown]
    same = [n for n, part in enumerate(said) if part.startswith(("parameters", "traffic", "links", "checks"))]
    assert [said[n] for n in same] == [shown[n] for n in same], "run `python docs/make_outputs.py`"
