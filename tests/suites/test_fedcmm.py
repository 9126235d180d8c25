"""FedCMM's methods: which parts each has, and that strengths reach them."""

import pytest

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.mixins import LwF
from lightning_fcl.models import event_log_likelihood
from lightning_fcl.suites.fedcmm import TABLES, TITLES, Strengths, event_module, fedcmm_rules


def parts(method, **strengths):
    rules = fedcmm_rules(method, event_log_likelihood, Strengths(**strengths))
    return {type(part).__name__: part for part in [*rules.get("callbacks", ()), rules.get("aggregator")] if part}


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("fedavg", set()),
        ("fedprox", {"FedProx"}),
        ("ewc", {"EWC"}),
        ("lwf", set()),
        ("gem", {"GEM"}),
        ("fedcmm", {"ModalityEWC", "EmbeddingReplay", "TSGA"}),
        ("no-ewc", {"EmbeddingReplay", "TSGA"}),
        ("no-replay", {"ModalityEWC", "TSGA"}),
        ("no-tsga", {"ModalityEWC", "EmbeddingReplay"}),
    ],
)
def test_each_method_has_its_parts(method, names):
    assert set(parts(method)) == names


def test_strengths_reach_their_parts():
    assert parts("ewc", ewc=3.0)["EWC"].strength == 3.0
    own = parts("fedcmm", vision=0.1, language=0.2, projector=0.3, threshold="auto", replay=2.0)
    assert own["ModalityEWC"].strengths == {"vision": 0.1, "language": 0.2, "projector": 0.3}
    assert own["TSGA"].threshold == "auto"
    assert own["EmbeddingReplay"].strength == 2.0
    one_sided = parts("language", vision=0.1, language=0.2, projector=0.3)["ModalityEWC"]
    assert one_sided.strengths == {"vision": 0.0, "language": 0.2, "projector": 0.0}
    assert parts("uniform")["ModalityEWC"].normalise == "global"


def test_what_sets_itself_and_what_only_the_last_task_is():
    both = parts("auto", vision=9.0, threshold=0.9)
    assert (both["ModalityEWC"].strength, both["TSGA"].threshold) == ("auto", "auto")
    assert (parts("auto-ewc")["ModalityEWC"].strength, parts("auto-ewc")["TSGA"].threshold) == ("auto", 0.5)
    assert parts("auto-tsga")["ModalityEWC"].strengths["vision"] == 0.3
    last = parts("last")
    assert (last["ModalityEWC"].memory, last["EmbeddingReplay"].memory) == ("last", "last")
    assert parts("fedcmm")["EmbeddingReplay"].memory == "all"


def test_unknown_method_is_refused():
    assert len(set(TITLES.values())) == len(TITLES)
    with pytest.raises(MisconfigurationError, match=r"`method` must be one of joint, .*, got 'magic'"):
        fedcmm_rules("magic", event_log_likelihood)


def test_lwf_is_in_the_module_and_not_in_a_language_model():
    module = event_module(["a"] * 7, posts=None, lwf=0.3)
    assert isinstance(module, LwF)
    assert module.lwf_strength == 0.3
    assert not isinstance(event_module(["a"] * 7, posts=None), LwF)
    with pytest.raises(MisconfigurationError, match="`method` must not be lwf with a `model`"):
        event_module(["a", "b"], model="anywhere", lwf=0.3)


def test_table_one_has_the_papers_methods_that_are_here():
    from lightning_fcl.reports import FEDCMM

    methods, settings = TABLES[1]
    assert {TITLES[name] + note for name in methods for _, _, note in settings} == set(FEDCMM[1].rows)
