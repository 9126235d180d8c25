"""A callback's pull against the same penalty written inside ``training_step``, under everything that can spoil it."""

import copy

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from tests.helpers.toy import ToyModule, toy_data

SETTINGS = {
    "plain": {},
    "accumulate 4": {"accumulate_grad_batches": 4},
    "clip norm": {"gradient_clip_val": 0.5},
    "clip value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "scaler": {"scaler": 1024.0},
    "all": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "scaler": 1024.0},
}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class InLoss(ToyModule):
    """The reference: the penalty is a term of the loss."""

    penalty = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.penalty is None else loss + self.penalty(dict(self.named_parameters()))


class ScaledButFull(MixedPrecision):
    """A GradScaler without half precision: the arithmetic stays float32, so any wrong scale shows."""

    def forward_context(self):
        return torch.autocast("cpu", enabled=False)


def make_trainer(callbacks=(), *, scaler=None, **options):
    plugins = []
    if scaler is not None:
        plugins = [ScaledButFull("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scaler))]
    return L.Trainer(
        **{**QUIET, "max_epochs": 2, "accelerator": "cpu", "devices": 1, **options},
        callbacks=list(callbacks),
        plugins=plugins,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )


def loader(shift=0.0, **options):
    return DataLoader(toy_data(64, shift=shift), batch_size=8, **options)  # eight batches: whole accumulation windows


def largest_difference(module, callbacks, penalty, **options):
    """Train ``module`` with the callback, and a copy with the penalty in its loss; the largest weight difference."""
    reference = copy.deepcopy(module)
    reference.penalty = penalty
    make_trainer(callbacks, **options).fit(module, loader())
    make_trainer(**options).fit(reference, loader())
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
