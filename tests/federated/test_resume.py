"""Kill a run anywhere; resumed, it ends with the same weights and the same metrics.csv, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_fcl.aggregators import Chain, FedAvg, ServerProximal
from lightning_fcl.callbacks import EWC, FaultInjector, RoundEarlyStopping
from lightning_fcl.exceptions import CheckpointError, ResumeMismatchError
from lightning_fcl.federated import checkpoint as checkpoint_module
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

ROOT = Path(__file__).resolve().parents[2]
FILES = ("metrics.csv", "accuracy.csv", "failures.csv")


def fit(run_dir, *, ckpt_path="auto", faults=(), strict_resume=True, **options):
    module = make_toy(dropout=0.3, batch_norm=True)
    stream = toy_stream(clients=4, examples=64)
    settings = {
        "rounds": 3,
        "eval_every": 2,
        "aggregator": Chain(FedAvg(), ServerProximal(0.2)),
        "callbacks": [EWC(2.0), *faults],
        "server_callbacks": [RoundEarlyStopping("round/val_acc", patience=9)],
    }
    trainer = toy_trainer(run_dir, **{**settings, **options})
    report = trainer.fit(module, stream, ckpt_path, strict_resume=strict_resume)
    return state_of(module), report


def kill_at(run_dir: str, spec: str) -> None:
    """Run in a process of its own that kills itself: ``spec`` is JSON of FaultInjector arguments, or a save offset."""
    what = json.loads(spec)
    if "offset" in what:
        written = 0
        original = checkpoint_module.write_tensors

        def write(path, *args, **options):
            nonlocal written
            digest = original(path, *args, **options)
            if written + path.stat().st_size > what["offset"]:
                os.truncate(path, what["offset"] - written)
                os.kill(os.getpid(), signal.SIGKILL)
            written += path.stat().st_size
            return digest

        checkpoint_module.write_tensors = write
        fit(run_dir)
    elif "rename" in what:
        commits = 0
        original_rename = Path.rename

        def rename(self, target):
            nonlocal commits
            commits += 1
            if commits == what["rename"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return original_rename(self, target)

        Path.rename = rename
        fit(run_dir)
    elif "signal" in what:
        fit(run_dir, faults=[Signals("drop", task=99, kind_of_signal=what["signal"])])
    else:
        fit(run_dir, faults=[FaultInjector("kill", **what)])


class Signals(FaultInjector):
    """Sends this process a signal in the second batch of a round."""

    def __init__(self, kind, *, task, kind_of_signal):
        super().__init__(kind, task=task)
        self.signal = kind_of_signal

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.task, trainer.round, batch_idx) == (1, 1, 1):
            os.kill(os.getpid(), getattr(signal, self.signal))


def run_and_kill(run_dir, spec, code=-signal.SIGKILL):
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location('killed', {str(Path(__file__))!r})\n"
        "module = module_from_spec(spec); spec.loader.exec_module(module)\n"
        "module.kill_at(sys.argv[1], sys.argv[2])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", script, str(run_dir), json.dumps(spec)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr[-2000:]


saved = {"bytes": 0}  # by all commits of the unbroken run


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    path, original = tmp_path_factory.mktemp("unbroken"), checkpoint_module.write_tensors

    def write(target, *args, **options):
        digest = original(target, *args, **options)
        saved["bytes"] += target.stat().st_size
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "write_tensors", write)
        state, report = fit(path)
    return state, {name: (path / name).read_bytes() for name in FILES}, report.accuracy


def check(run_dir, unbroken):
    state, files, accuracy = unbroken
    resumed, report = fit(run_dir, faults=[FaultInjector("kill", task=99)])
    assert_same_bits(state, resumed)
    assert torch.equal(accuracy, report.accuracy)
    for name in FILES:
        assert (run_dir / name).read_bytes() == files[name], name
    assert not list((run_dir / "checkpoints").glob(".*")), "leftovers of the killed save"


KILLS = {
    "first batch of the run": {"task": 0, "round": 0},
    "local training": {"task": 1, "round": 1, "clients": [2, 3]},
    "between two updates": {"task": 0, "round": 2, "where": "upload", "clients": [2, 3]},
    "boundary pass": {"task": 0, "where": "boundary", "clients": [2]},
    "last boundary pass": {"task": 1, "where": "boundary", "clients": [3]},
    "in the middle of a save": {"offset": 8_000},
    "before the rename": {"rename": 4},
}


@pytest.mark.parametrize("kill", KILLS)
def test_killed_run_resumes_to_the_same_bits(kill, unbroken, tmp_path):
    run_and_kill(tmp_path, KILLS[kill])
    check(tmp_path, unbroken)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])  # 143 and 130 in a shell
def test_signals_end_the_run_at_once_and_lose_one_round(name, unbroken, tmp_path):
    run_and_kill(tmp_path, {"signal": name}, code=-getattr(signal, name))
    assert checkpoint_module.CheckpointFolder(tmp_path / "checkpoints").numbers()[-1] == 5
    check(tmp_path, unbroken)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_byte_of_a_save(unbroken, tmp_path):
    generator = torch.Generator().manual_seed(0)
    for index, offset in enumerate(torch.randint(1, saved["bytes"], (20,), generator=generator).tolist()):
        run_and_kill(tmp_path / str(index), {"offset": offset})
        check(tmp_path / str(index), unbroken)


def test_killed_twice(unbroken, tmp_path):
    run_and_kill(tmp_path, {"task": 0, "round": 1})
    run_and_kill(tmp_path, {"task": 1, "round": 2})
    check(tmp_path, unbroken)


def test_resuming_a_finished_run_changes_nothing(unbroken, tmp_path):
    fit(tmp_path)
    check(tmp_path, unbroken)


def test_one_process_resumes_what_two_began(ranks, unbroken, tmp_path):
    ranks.run(fit_until, str(tmp_path))
    check(tmp_path, unbroken)


def fit_until(run_dir: str) -> None:
    """Two ranks stop at the same place with an error."""
    fault = FaultInjector("exception", task=1, round=1)
    with pytest.raises(Exception, match="injected fault"):
        fit(run_dir, faults=[fault], devices=2)


def started(tmp_path, **options):
    """A run that stopped in its second task."""
    with pytest.raises(RuntimeError, match="injected"):
        fit(tmp_path, faults=[FaultInjector("exception", task=1, round=1)], **options)


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


def newest(run_dir):
    return sorted((run_dir / "checkpoints").glob("round_*"))[-1]


@pytest.mark.filterwarnings("ignore:.*falling back")
@pytest.mark.parametrize("name", ["model.safetensors", "server.safetensors", "manifest.json"])
def test_cut_files_fall_back_to_the_commit_before(name, unbroken, tmp_path):
    started(tmp_path)
    for share in (0.0, 0.3, 0.9):
        folder = newest(tmp_path)
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(original[: int(len(original) * share)])
        with pytest.warns(UserWarning, match="falling back"):
            assert checkpoint_module.CheckpointFolder(tmp_path / "checkpoints").newest().manifest["number"] == 4
        (folder / name).write_bytes(original)
    (newest(tmp_path) / name).write_bytes(b"")
    with pytest.warns(UserWarning, match="falling back"):
        check(tmp_path, unbroken)


def test_every_flipped_bit_is_found(tmp_path):
    started(tmp_path)
    folder = newest(tmp_path)
    generator = torch.Generator().manual_seed(1)
    for name in ("model.safetensors", "server.safetensors"):
        original = (folder / name).read_bytes()
        for bit in torch.randint(0, 8 * len(original), (25,), generator=generator).tolist():
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << (bit % 8)
            (folder / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"{name}.*its hash differs"):
                checkpoint_module.load_checkpoint(folder)
        (folder / name).write_bytes(original)
    assert checkpoint_module.load_checkpoint(folder).manifest["number"] == 5


def _edit(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), "manifest.json' is missing"),
        (lambda f: (f / "more.bin").write_bytes(b"x"), r"differing: \['more.bin'\]"),
        (lambda f: (f / "server.safetensors").unlink(), r"differing: \['server.safetensors'\]"),
        (lambda f: _edit(f, format=0), "has checkpoint format 0"),
        (lambda f: _edit(f, files={"../../x": "0" * 64}), "must list model.safetensors"),
        (lambda f: _edit(f, files={"/etc/passwd": "0" * 64}), "must list model.safetensors"),
    ],
)
def test_strange_folders_are_refused(damage, message, tmp_path):
    started(tmp_path)
    damage(newest(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        checkpoint_module.load_checkpoint(newest(tmp_path))


def test_nothing_is_unpickled(tmp_path):
    import pickle

    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "marker",)

    started(tmp_path)
    folder = newest(tmp_path)
    for name in ("model.safetensors", "server.safetensors"):
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Payload()))
        _edit(folder, files={n: _sha(folder / n) for n in ("model.safetensors", "server.safetensors")})
        with pytest.raises(CheckpointError):
            checkpoint_module.load_checkpoint(folder)
        (folder / name).write_bytes(original)
    assert not (tmp_path / "marker").exists()


def _sha(path):
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_no_valid_commit_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="`ckpt_path` must name a run with a committed round"):
        fit(tmp_path, ckpt_path="last")


def test_a_used_folder_is_not_overwritten(tmp_path):
    fit(tmp_path)
    with pytest.raises(CheckpointError, match="already holds a run"):
        fit(tmp_path, ckpt_path=None)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seed": 1}, "trainer.seed: 0 -> 1"),
        ({"rounds": 4}, "trainer.rounds: 3 -> 4"),
        ({"aggregator": FedAvg()}, "trainer.aggregator"),
        ({"payload": "net.0*"}, "trainer.payload: '\\*' -> 'net.0\\*'"),
        ({"local_epochs": 2}, "trainer.local_epochs: 1 -> 2"),
    ],
)
def test_changed_settings_are_refused_with_the_difference(options, line, tmp_path):
    started(tmp_path)
    with pytest.raises(ResumeMismatchError, match=line):
        fit(tmp_path, faults=[FaultInjector("exception", task=1, round=1)], **options)


def test_changed_settings_pass_when_asked_for(tmp_path, capsys):
    started(tmp_path)
    fault = FaultInjector("exception", task=99)
    fit(tmp_path, faults=[fault], strict_resume=False, rounds=4, eval_every=1)
    assert "trainer.rounds: 3 -> 4" in capsys.readouterr().err


def test_changed_partition_is_refused(tmp_path):
    trainer = toy_trainer(tmp_path, callbacks=[FaultInjector("exception", task=1)])
    with pytest.raises(RuntimeError, match="injected"):
        trainer.fit(make_toy(), toy_stream(seed=0))
    with pytest.raises(ResumeMismatchError, match=r"stream\.plan"):
        toy_trainer(tmp_path, callbacks=trainer.callbacks).fit(make_toy(), toy_stream(seed=1), "last")


def test_checkpoint_opens_with_plain_safetensors(tmp_path):
    state, _ = fit(tmp_path)
    loaded = load_file(newest(tmp_path) / "model.safetensors")
    assert_same_bits({name: state[name] for name in loaded}, loaded)
    assert loaded.keys() == state.keys()


def test_full_disk_keeps_what_was_committed(tmp_path, monkeypatch):
    original, calls = checkpoint_module.write_tensors, 0

    def write(path, *args, **options):
        nonlocal calls
        calls += 1
        if calls > 4:
            raise OSError(28, "No space left on device")
        return original(path, *args, **options)

    monkeypatch.setattr(checkpoint_module, "write_tensors", write)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Earlier commits are intact"):
        fit(tmp_path)
    assert checkpoint_module.CheckpointFolder(tmp_path / "checkpoints").newest().manifest["number"] == 2
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_client_states_of_old_rounds_are_deleted(tmp_path):
    fit(tmp_path)
    needed = set()
    for folder in (tmp_path / "checkpoints").glob("round_*"):
        needed |= {(int(c), v) for c, v in json.loads((folder / "manifest.json").read_text())["clients"].items()}
    files = {
        (int(p.parent.name.removeprefix("client_")), int(p.stem.removeprefix("round_")))
        for p in (tmp_path / "clients").glob("*/*")
    }
    assert files == needed
    shutil.rmtree(tmp_path / "clients")
