"""Never lost, never poisoned: rows F1-F8, F11-F20 and F42 of the fault matrix (kills and files: test_resume.py)."""

import csv
import dataclasses
import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.callbacks import ContinualCallback, FaultInjector
from lightning_fcl.exceptions import EmptyRoundError, FCLError, MisconfigurationError, NoTrainingError
from lightning_fcl.federated.engines.replica import ReplicaEngine
from lightning_fcl.federated.guard import UpdateGuard, all_finite
from lightning_fcl.federated.layout import build_layout
from lightning_fcl.types import ClientUpdate
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped")


def fit(run_dir, *faults, stream=None, module=None, **options):
    module = module or make_toy(batch_norm=True)
    settings = {"clients_per_round": 4, "callbacks": list(faults), "on_client_error": "skip"}
    report = toy_trainer(run_dir, **{**settings, **options}).fit(module, stream or toy_stream(examples=64))
    return state_of(module), report


def rows(run_dir, name="failures.csv"):
    with (run_dir / name).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def without_client_one(tmp_path_factory):
    """What a run gives in which client 1 sends nothing in round 0 of task 0."""
    state, _ = fit(tmp_path_factory.mktemp("reference"), FaultInjector("drop", clients=[1], task=0, round=0))
    return state


REASONS = {
    "exception": ("train", "RuntimeError"),
    "nan_gradient": ("train", "diverged"),
    "nan": ("guard", "non_finite"),
    "inf": ("guard", "non_finite"),
    "shape": ("guard", "shape"),
    "dtype": ("guard", "dtype"),
    "missing": ("guard", "missing"),
    "extra": ("guard", "extra"),
    "renamed": ("guard", "renamed"),
    "zero_examples": ("guard", "zero_examples"),
    "negative_examples": ("guard", "weight"),
    "nan_examples": ("guard", "weight"),
    "unsampled": ("guard", "unsampled"),
    "stale": ("guard", "stale"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_bad_client_is_named_and_the_others_go_on(kind, without_client_one, tmp_path):
    """F11, F14-F18, F20, F21: the result is that of the other clients, and failures.csv says why."""
    state, _ = fit(tmp_path, FaultInjector(kind, clients=[1], task=0, round=0))
    assert_same_bits(state, without_client_one)
    (row,) = rows(tmp_path)
    phase, reason = REASONS[kind]
    assert (row["task"], row["round"], row["client"], row["phase"], row["reason"]) == ("0", "0", "1", phase, reason)
    assert row["detail"]
    assert rows(tmp_path, "metrics.csv")[0]["round/clients"] == "3.0"


def test_duplicate_is_counted_once(tmp_path):
    """F19."""
    clean, _ = fit(tmp_path / "clean")
    state, _ = fit(tmp_path / "twice", FaultInjector("duplicate", clients=[2], task=0, round=0))
    assert_same_bits(clean, state)
    assert [r["reason"] for r in rows(tmp_path / "twice")] == ["duplicate"]


def test_other_float_types_are_cast(tmp_path):
    """F17: bfloat16 from one client is averaged in float64 and rounded to the model's float32."""
    state, _ = fit(tmp_path, FaultInjector("half", clients=[2]))
    assert all(t.dtype in (torch.float32, torch.int64) for t in state.values())
    assert rows(tmp_path) == []


def test_hanging_client_is_given_up_in_time(tmp_path):
    """F12: the round closes at the limit plus 10 %, with the clients that answered."""
    limit = 1.0
    fault = FaultInjector("hang", clients=[1], task=0, round=0, seconds=60.0)
    started = time.monotonic()
    fit(tmp_path, fault, client_timeout=limit, rounds=1, stream=toy_stream(tasks=1, examples=64))
    assert time.monotonic() - started < 20
    assert [r["reason"] for r in rows(tmp_path)] == ["timeout"]
    assert float(rows(tmp_path, "timing.csv")[0]["train"]) < limit * 1.1 + 2.0


def test_hang_between_batches_is_noticed_without_signals(tmp_path, monkeypatch):
    import signal

    monkeypatch.delattr(signal, "setitimer")
    fault = FaultInjector("hang", clients=[1], task=0, round=0, seconds=0.5)
    fit(tmp_path, fault, client_timeout=0.3, rounds=1)
    assert [r["reason"] for r in rows(tmp_path)] == ["timeout"]


def test_retry_gives_the_clean_result(tmp_path):
    clean, _ = fit(tmp_path / "clean")
    fault = FaultInjector("exception", clients=[1, 2], task=1, times=2)
    state, _ = fit(tmp_path / "retried", fault, on_client_error="retry", max_retries=2)
    assert_same_bits(clean, state)
    assert [r["reason"] for r in rows(tmp_path / "retried")] == ["RuntimeError"] * 2


def test_retries_end(tmp_path):
    _, _ = fit(tmp_path, FaultInjector("exception", clients=[1]), on_client_error="retry", max_retries=2)
    failed = rows(tmp_path)
    assert len(failed) == 3 * 4  # three attempts in each of four rounds
    assert {r["client"] for r in failed} == {"1"}


def test_the_default_is_to_raise_the_clients_own_error(tmp_path):
    with pytest.raises(RuntimeError, match="injected fault in client 1"):
        fit(tmp_path, FaultInjector("exception", clients=[1]), on_client_error="raise")


def test_error_on_another_process_raises_everywhere(ranks, tmp_path):
    messages = ranks.run(fails_on_one_rank, str(tmp_path))
    assert any("injected fault in client 3" in m for m in messages)
    assert any("client 3 failed: RuntimeError" in m and "on_client_error='skip'" in m for m in messages)


def fails_on_one_rank(run_dir: str) -> str:
    with pytest.raises((RuntimeError, FCLError)) as caught:
        fit(run_dir, FaultInjector("exception", clients=[3]), on_client_error="raise", devices=2)
    return str(caught.value)


def test_empty_rounds_leave_the_model_alone_and_end_the_run(tmp_path):
    """F13."""
    module = make_toy()
    before = state_of(module)
    with pytest.raises(
        EmptyRoundError, match=r"3 rounds in a row had too few usable updates \(reasons: RuntimeError\)"
    ):
        fit(tmp_path, FaultInjector("exception"), module=module, rounds=5)
    assert_same_bits(before, state_of(module))
    assert len(rows(tmp_path)) == 3 * 4


def test_one_empty_round_changes_nothing_but_the_log(tmp_path):
    module = make_toy()
    before = state_of(module)
    fit(tmp_path, FaultInjector("nan"), module=module, rounds=2, stream=toy_stream(tasks=1))
    assert_same_bits(before, state_of(module))
    assert [r["round/clients"] for r in rows(tmp_path, "metrics.csv")] == ["0.0", "0.0"]


@pytest.mark.parametrize(("quorum", "changes"), [(3, False), (2, True), (0.6, False), (0.5, True)])
def test_quorum(quorum, changes, tmp_path):
    module = make_toy()
    before = state_of(module)
    fault = FaultInjector("nan", clients=[0, 1])
    fit(tmp_path, fault, module=module, rounds=1, stream=toy_stream(tasks=1), min_completed=quorum)
    assert changes == any(not torch.equal(before[n], t) for n, t in state_of(module).items())


def test_failure_in_a_boundary_pass_follows_the_policy(tmp_path):
    fault = FaultInjector("exception", clients=[1], task=0, where="boundary")
    fit(tmp_path / "skip", fault)
    assert [(r["phase"], r["reason"]) for r in rows(tmp_path / "skip")] == [("boundary", "RuntimeError")]
    with pytest.raises(RuntimeError, match="injected"):
        fit(tmp_path / "raise", fault, on_client_error="raise")


class KeepsCount(ContinualCallback):
    """State that a failed job must not change."""

    def __init__(self):
        self.count = torch.zeros(1)

    def on_train_start(self, trainer, pl_module):
        self.count += 1  # in place: a failed job must still leave the stored state alone

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_failed_job_leaves_no_trace_in_the_clients_state(tmp_path):
    fault = FaultInjector("exception", clients=[1], task=1, round=0)
    fit(tmp_path, KeepsCount(), fault)
    from lightning_fcl.serialize import load_tree

    newest = {p.parent.name: p for p in sorted((tmp_path / "clients").glob("*/*"))}
    counts = {name: load_tree(p)["callbacks"]["KeepsCount"]["count"].item() for name, p in newest.items()}
    assert counts == {"client_000000": 4, "client_000001": 3, "client_000002": 4, "client_000003": 4}


def test_aggregator_that_makes_nan_is_stopped_before_it_reaches_the_model(tmp_path):
    from lightning_fcl.aggregators import Chain, FedAvg, ServerStep

    class Broken(ServerStep):
        def apply(self, params, delta, stats, state):
            return delta * math.nan, state

    module = make_toy()
    before = state_of(module)
    with pytest.raises(FCLError, match="aggregator made non-finite weights in task 0, round 0"):
        fit(tmp_path, module=module, aggregator=Chain(FedAvg(), Broken()))
    assert_same_bits(before, state_of(module))


class TrainsNothing(ToyModule):
    def on_train_start(self):
        self.trainer.should_stop = True


def test_a_job_without_a_step_is_an_error(tmp_path):
    with pytest.raises(NoTrainingError, match="client 0 took no optimiser step in task 0"):
        fit(
            tmp_path,
            module=make_toy(cls=TrainsNothing),
            on_client_error="raise",
            clients_per_round=1,
            rounds=1,
            stream=toy_stream(clients=1),
        )


# -- the guard alone --------------------------------------------------------------------------------------------------

MODULE = make_toy(batch_norm=True)
LAYOUT = build_layout(MODULE)
COUNTERS = {name: dict(MODULE.named_buffers())[name] for name in LAYOUT.counters}


def an_update(**changes):
    values = {**dict(MODULE.named_parameters()), **dict(MODULE.named_buffers())}
    tensors = {name: values[name].detach().clone() for name in [s.name for s in LAYOUT.slots] + list(LAYOUT.counters)}
    return ClientUpdate(**{"client": 1, "task": 0, "round": 2, "num_examples": 5.0, "tensors": tensors, **changes})


def a_guard():
    return UpdateGuard(LAYOUT, COUNTERS, [0, 1, 2], task=0, round=2)


def test_a_good_update_passes():
    assert a_guard().check(an_update()) is None


@given(data=st.data())
def test_any_single_damage_is_found(data):
    """F14, F16: fuzzed over tensors and kinds of damage."""
    update = an_update()
    name = data.draw(st.sampled_from(sorted(update.tensors)))
    tensor = update.tensors[name]
    kinds = ["missing", "renamed", "shape", "kind"] + (["nan", "inf", "-inf"] if tensor.is_floating_point() else [])
    kind = data.draw(st.sampled_from(kinds))
    tensors = dict(update.tensors)
    if kind in ("missing", "renamed"):
        value = tensors.pop(name)
        if kind == "renamed":
            tensors[name + ".x"] = value
    elif kind == "shape":
        tensors[name] = torch.zeros(*tensor.shape, 2)
    elif kind == "kind":
        tensors[name] = tensor.to(torch.complex64) if tensor.is_floating_point() else tensor.float()
    else:
        place = data.draw(st.integers(0, tensor.numel() - 1))
        tensors[name] = tensor.clone()
        tensors[name].view(-1)[place] = float(kind)
    rejection = a_guard().check(dataclasses.replace(update, tensors=tensors))
    assert rejection is not None
    expected = {"kind": "dtype", "nan": "non_finite", "inf": "non_finite", "-inf": "non_finite"}
    assert rejection.reason == expected.get(kind, kind)
    assert name.split(".x")[0] in rejection.detail


def test_finite_values_whose_sum_overflows_pass():
    big = torch.full((4,), 3e38)
    assert all_finite(big)
    assert not all_finite(torch.tensor([3e38, 3e38, math.inf, -math.inf]))
    assert not all_finite(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize("count", [math.nan, math.inf, -1.0])
def test_weights_that_are_no_weights(count):
    assert a_guard().check(an_update(num_examples=count)).reason == "weight"


def test_unknown_faults_are_refused():
    with pytest.raises(MisconfigurationError, match="`kind` must be one of exception, hang"):
        FaultInjector("gremlin")
    with pytest.raises(MisconfigurationError, match='`where` must be "train"'):
        FaultInjector("kill", where="server")


def test_engine_is_an_ordinary_module_again_after_an_error(tmp_path):
    module = make_toy()
    with pytest.raises(RuntimeError, match="injected"):
        fit(tmp_path, FaultInjector("exception"), module=module, on_client_error="raise")
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == len(list(module.parameters()))
    assert "log" not in vars(module)
    assert module._trainer is None
    assert ReplicaEngine.flat is None
