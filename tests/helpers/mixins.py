"""A loss mixin against the same terms written into ``training_step`` by hand."""

import copy

import torch
from torch import nn

from tests.helpers.penalty import loader, make_trainer
from tests.helpers.toy import ToyModule, make_toy, state_of, toy_stream, toy_trainer


class ByHand(ToyModule):
    """The reference: ``total(loss, x, y, features, logits)`` is the whole loss."""

    total = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.net[:-1](x)
        logits = self.net[-1](features)
        loss = nn.functional.cross_entropy(logits.float(), y)
        return loss if self.total is None else self.total(loss, x, y, features, logits)


class Teacher:
    """A frozen copy of a toy module: an object of its own, in eval mode."""

    def __init__(self, module):
        self._module = copy.deepcopy(module).eval()

    @torch.no_grad()
    def features(self, x):
        return self._module.net[:-1](x)

    @torch.no_grad()
    def logits(self, x):
        return self._module(x)


def fit(module, shift=0.0, **options):
    """One task in a stock ``Trainer``."""
    trainer = make_trainer(**options)
    trainer.fit(module, loader(shift))
    return trainer


def federate(module, run_dir, stream=None, **options):
    """Two tasks in a federation."""
    return toy_trainer(run_dir, **options).fit(module, toy_stream() if stream is None else stream)


def twins(cls, **options):
    """The same BatchNorm module with the mixin and without."""
    return make_toy(cls=cls, batch_norm=True, **options), make_toy(cls=ByHand, batch_norm=True)


def assert_close(first, second):
    first, second = state_of(first), state_of(second)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6, msg=name)


def differ(first, second):
    return any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
