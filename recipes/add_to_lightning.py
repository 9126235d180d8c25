"""An ordinary Lightning project, to which one line adds EWC: how much of the first task is left after the second?

    python recipes/add_to_lightning.py                                  # without and with EWC: half a minute
    python recipes/add_to_lightning.py --method ewc --strength 400
    python recipes/add_to_lightning.py --data-dir DIR                   # real MNIST, then MNIST-M

All but the marked line is what a Lightning user writes anyway: a module, DataLoaders, and a new ``lightning.Trainer``
for each task. ``DIR`` holds files as ``load_digit_folder`` reads them; ``$FCL_DATA/digits`` if that variable is set.
"""

import logging
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_fcl import EWC, RunReport
from lightning_fcl._recipes import chosen_methods, command_line, real_data
from lightning_fcl.data import digit_domains, load_digit_folder
from lightning_fcl.reports import compare

Batch = tuple[Tensor, Tensor]


class LitDigits(L.LightningModule):
    """A small convolutional classifier of 16x16 digits; nothing in it knows of tasks."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self(x).argmax(dim=1) == y).float().mean(), batch_size=len(y))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main(
    out: Path = Path("runs/add_to_lightning"),
    seed: int = 0,
    method: str | list[str] = "all",
    data_dir: Path | None = None,
    smoke: bool = False,
    epochs: int = 5,
    lr: float = 0.01,
    strength: float = 100.0,
) -> dict[str, dict[str, float]]:
    """Train on two tasks, one after the other, and print what is left of the first.

    Args:
        out: Folder for the reports, one run folder per method.
        seed: Seeds initial weights and the order of the examples.
        method: ``none``, ``ewc``, or ``all`` for both.
        data_dir: Folder with real digits; without it, scikit-learn's digits, then the same in white on black.
        smoke: End in seconds, with fewer epochs.
        epochs: Passes over each task.
        lr: Learning rate.
        strength: EWC's pull toward the first task.

    Returns:
        By method: accuracy on both tasks at the end, on the first task right after it, and the change since.
    """
    names = chosen_methods(method, ("none", "ewc"))
    if (folder := real_data(data_dir, "digits")) is None:
        domains = digit_domains(("clean", "inverted"), seed=seed)
    else:
        domains = load_digit_folder(folder, ("mnist", "mnistm"), size=16, channels=1)
    tests = [DataLoader(test, batch_size=500) for _, test in domains.values()]
    reports = []
    for name in names:
        started = time.perf_counter()
        L.seed_everything(seed, verbose=False)
        model = LitDigits(lr)
        callbacks: list[L.Callback] = []
        if name == "ewc":
            callbacks.append(EWC(strength))  # the one line
        scores = []
        for train, _ in domains.values():
            trainer = quiet_trainer(2 if smoke else epochs, callbacks)
            trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
            scores.append([trainer.validate(model, test, verbose=False)[0]["val_acc"] for test in tests])
        report = RunReport(
            run_dir=out / name,
            method="EWC" if name == "ewc" else "no method",
            accuracy=torch.tensor(scores),
            names=tuple(domains),
            seed=seed,
            score="val_acc",
            config={"epochs": epochs, "lr": lr, "strength": strength if name == "ewc" else 0.0, "data": folder},
            wall_seconds=time.perf_counter() - started,
        )
        report.save()
        print(report, end="\n\n")
        reports.append(report)
    print(compare(reports))
    print("report:", *(report.run_dir / "report.html" for report in reports))
    return {r.method: {"first_before": float(r.accuracy[0, 0]), **r.summary} for r in reports}


def quiet_trainer(epochs: int, callbacks: list[L.Callback]) -> L.Trainer:
    """A stock Trainer that writes and prints nothing."""
    return L.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    command_line(main)
