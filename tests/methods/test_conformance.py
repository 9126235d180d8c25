"""Every public method, found by its card, keeps the house's promises."""

import pytest

from lightning_fcl.aggregators import FedAvg
from lightning_fcl.testing import conformance
from lightning_fcl.testing.conformance import Shell

METHODS = [pytest.param(method, id=method.__name__) for method in conformance.method_classes()]
BY_DEFAULT = {"EWC", "ServerProximal"}  # one of each kind; all of them in the slow tests
WITH_TWO_RANKS = [
    p if p.values[0].__name__ in BY_DEFAULT else pytest.param(*p.values, id=p.id, marks=pytest.mark.slow)
    for p in METHODS
]
HAVE_NEUTRAL = [p for p in METHODS if p.values[0].card.neutral is not None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What no method at all leaves behind in a method's module, made once per module."""
    runs = {}

    def run(method):
        base = conformance.base_of(method)
        if base not in runs:
            runs[base] = Shell(FedAvg, tmp_path_factory.mktemp("plain"), base).run("plain", {})
        return runs[base]

    return run


@pytest.fixture(scope="module")
def smoked(tmp_path_factory):
    """The run of a method with its smoke arguments, made once."""
    runs = {}

    def run(method):
        if method not in runs:
            shell = Shell(method, tmp_path_factory.mktemp(method.__name__))
            runs[method] = shell, shell.run("smoked")
        return runs[method]

    return run


def test_methods_are_found():
    assert {"EWC", "FedAvg", "FedProx", "ServerProximal"} <= {p.values[0].__name__ for p in METHODS}


@pytest.mark.parametrize("method", [p for p in METHODS if p.values[0] is not FedAvg])
def test_it_has_an_effect(method, smoked, plain):
    conformance.check_effect(*smoked(method), plain(method))


@pytest.mark.parametrize("method", HAVE_NEUTRAL)
def test_its_neutral_setting_is_fedavg(method, tmp_path, plain):
    conformance.check_neutral(Shell(method, tmp_path), plain(method))


@pytest.mark.parametrize("method", METHODS)
def test_it_resumes_bit_for_bit(method, smoked):
    conformance.check_resume(*smoked(method))


@pytest.mark.parametrize("method", METHODS)
def test_it_saves_plain_files_only(method, smoked):
    conformance.check_files(*smoked(method))


@pytest.mark.parametrize("method", METHODS)
def test_it_can_be_copied_and_pickled(method, tmp_path):
    conformance.check_copies(Shell(method, tmp_path))


@pytest.mark.parametrize("method", METHODS)
def test_a_second_object_does_not_collide(method, smoked):
    conformance.check_two_instances(*smoked(method))


def on_one_rank_of_two(name, run_dir):
    method = next(m for m in conformance.method_classes() if m.__name__ == name)
    return Shell(method, run_dir).run("two", devices=2).weights


@pytest.mark.distributed
@pytest.mark.parametrize("method", WITH_TWO_RANKS)
def test_two_processes_end_where_one_does(method, smoked, ranks, tmp_path):
    _, alone = smoked(method)
    for weights in ranks.run(on_one_rank_of_two, method.__name__, tmp_path):
        assert [name for name, value in alone.weights.items() if not value.equal(weights[name])] == []
