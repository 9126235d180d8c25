"""MA-EWC's strengths that set themselves: the rule, and that each client follows it once a task."""

import pytest
import torch

from lightning_fcl.callbacks import ContinualCallback, ModalityEWC
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import balanced_strengths, classification_log_likelihood, fisher_diagonal
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.toy import make_toy, toy_stream, toy_trainer
from tests.methods.test_modality_ewc import FISHER, GROUPS, HALVES, f64, fit

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


def test_balanced_strength_sends_weights_to_the_mean_of_the_optima():
    """Quadratic losses of one curvature: 1/2 h (w - 1)^2 and pulls to optima at 0 and at 0.5 end at their mean."""
    curvature, old = 3.0, {"w": f64(0.2, 0.2)}  # importances of two tasks, 0.1 each, on a scale of their own
    [strength] = balanced_strengths(old, {"w": f64(curvature, curvature)}, {"all": ["w"]}, tasks=2).values()
    pull = strength * 0.1  # of each task
    assert pull == pytest.approx(curvature)
    w = (curvature * 1.0 + pull * 0.0 + pull * 0.5) / (curvature + 2 * pull)
    assert w == pytest.approx((0.0 + 0.5 + 1.0) / 3)


def test_balanced_strengths_do_not_mind_the_scale_of_importances_and_pass_by_dead_groups():
    new = {name: 7 * value for name, value in FISHER.items()}
    assert balanced_strengths(FISHER, new, GROUPS) == pytest.approx(dict.fromkeys(GROUPS, 7.0))
    scaled = {**{name: 100 * value for name, value in FISHER.items()}, "l": f64(0)}
    found = balanced_strengths(scaled, new, GROUPS, tasks=3)
    assert found == pytest.approx({"vision": 0.21, "language": 0.0, "projector": 0.21})
    with pytest.raises(ValueError, match="`tasks` must be at least 1, got 0"):
        balanced_strengths(FISHER, new, GROUPS, tasks=0)


class Witness(ContinualCallback):
    """Measures by itself, one sample at a time, what the strengths of each first job of a task must be."""

    def __init__(self, ewc):
        self.ewc, self.wanted, self.seen = ewc, {}, {}

    def on_train_start(self, trainer, pl_module):
        if self.ewc.importance:
            key = trainer.client, trainer.task
            loader = trainer.train_dataloader
            with torch.random.fork_rng([]):
                new = fisher_diagonal(pl_module, classification_log_likelihood, loader, method="loop")
            for group, rule in (("vision", "net.0."), ("language", "net.2.")):
                top, bottom = (sum(t[n].sum() for n in t if n.startswith(rule)) for t in (new, self.ewc.importance))
                self.wanted.setdefault((*key, group), (trainer.task * top / bottom).item())

    def on_train_end(self, trainer, pl_module):
        for group, value in self.ewc.strengths.items():
            self.seen.setdefault((trainer.client, trainer.task, group), set()).add(value)


@pytest.mark.parametrize("normalise", ["none", "per_group"])
def test_each_client_sets_its_strengths_once_a_task(tmp_path, normalise):
    ewc = ModalityEWC("auto", groups=HALVES, normalise=normalise)
    witness = Witness(ewc)
    trainer = toy_trainer(tmp_path, callbacks=[ewc, witness], rounds=2, clients_per_round=4)
    trainer.fit(make_toy(), toy_stream(tasks=3))
    assert {task for _, task, _ in witness.seen} == {1, 2}
    assert all(len(values) == 1 for values in witness.seen.values())  # the second round keeps the first one's
    assert {key: values.pop() for key, values in witness.seen.items()} == pytest.approx(witness.wanted, rel=1e-4)
    assert "client/ewc/vision" in (tmp_path / "metrics.csv").read_text()


def test_auto_does_not_depend_on_the_scale_of_importances(tmp_path):
    states = [
        fit(tmp_path / how, [ModalityEWC("auto", groups=HALVES, normalise=how)], tasks=2)
        for how in ("none", "per_group")
    ]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)
    plain = fit(tmp_path / "plain", [ModalityEWC(0.0, groups=HALVES)], tasks=2)
    assert max((plain[name] - value).abs().max() for name, value in states[0].items()) > 1e-3


def test_auto_in_a_stock_trainer_measures_each_fit_and_resumes(tmp_path):
    module, callback = make_toy(), ModalityEWC("auto", groups=HALVES)
    make_trainer([callback], max_epochs=1).fit(module, loader())
    assert callback.strengths == {}
    new = fisher_diagonal(module, classification_log_likelihood, loader(), method="loop")
    wanted = balanced_strengths(callback.importance, new, callback.members(new))
    seen = []

    class Look(ContinualCallback):
        def on_train_batch_end(self, *args):
            seen.append(dict(callback.strengths))

    make_trainer([callback, Look()], max_epochs=1).fit(module, loader())
    assert seen[0] == seen[-1] == pytest.approx(wanted, rel=1e-4)
    callback.strengths = seen[0]
    copy = ModalityEWC("auto", groups=HALVES)
    copy.load_state_dict(callback.state_dict())
    assert (copy.strengths, copy._tasks) == (seen[0], 2)


def test_other_words_than_auto_are_refused():
    with pytest.raises(MisconfigurationError, match='`strength` must be a number, one by group, or "auto"'):
        ModalityEWC("strong")
