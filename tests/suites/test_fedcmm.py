"""FedCMM's methods: which parts each has, and that strengths reach them."""

import pytest

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.models import event_log_likelihood
from lightning_fcl.suites.fedcmm import TITLES, Strengths, fedcmm_rules


def parts(method, **strengths):
    rules = fedcmm_rules(method, event_log_likelihood, Strengths(**strengths))
    return {type(part).__name__: part for part in [*rules.get("callbacks", ()), rules.get("aggregator")] if part}


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("fedavg", set()),
        ("fedprox", {"FedProx"}),
        ("ewc", {"EWC"}),
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


def test_unknown_method_is_refused():
    assert len(set(TITLES.values())) == len(TITLES)
    with pytest.raises(MisconfigurationError, match=r"`method` must be one of joint, .*, got 'magic'"):
        fedcmm_rules("magic", event_log_likelihood)
