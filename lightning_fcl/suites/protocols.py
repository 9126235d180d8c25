"""The three suites: what FedADB, SPECIAL and FedCMM measure, on data that is at hand."""

from pathlib import Path
from typing import Any

from lightning_fcl.data.digits import Domains, digit_domains, load_digit_folder
from lightning_fcl.data.dirichlet import LabelDirichlet
from lightning_fcl.data.stream import TaskStream
from lightning_fcl.models.classifier import ImageClassifier
from lightning_fcl.models.smallconv import SmallConvNet
from lightning_fcl.reports.published import FEDADB_SILO, FEDCMM_PHEME, SPECIAL_DIGIT10
from lightning_fcl.suites.suite import Suite

_BATCH: dict[str, Any] = {"batch_size": 16, "eval_batch_size": 500}
_LIMIT = 2400  # most images of a real data set


def _domains(data_dir: Path | None, embedded: list[str], real: list[str]) -> Domains:
    """Domains of 16x16 pixels."""
    if data_dir is None:
        return digit_domains(embedded, size=16)
    return load_digit_folder(data_dir, real, size=16, limit=_LIMIT)


def one_task(clients: int, seed: int, data_dir: Path | None) -> TaskStream:
    """A single task whose labels are skewed: forgetting happens between clients."""
    data = _domains(data_dir, ["clean"], ["svhn"])
    return TaskStream.domains(data, clients=clients, partition=LabelDirichlet(0.1, min_examples=2), seed=seed, **_BATCH)


def four_domains(clients: int, seed: int, data_dir: Path | None) -> TaskStream:
    """Four domains of digits, one after another."""
    data = _domains(data_dir, ["clean", "inverted", "turned", "textured"], ["mnist", "mnistm", "usps", "svhn"])
    return TaskStream.domains(data, clients=clients, partition=LabelDirichlet(0.1, min_examples=2), seed=seed, **_BATCH)


def new_classes(clients: int, seed: int, data_dir: Path | None) -> TaskStream:
    """New classes in each of three tasks, as new events in a stream of posts."""
    ((train, test),) = _domains(data_dir, ["clean"], ["mnist"]).values()
    partition = LabelDirichlet(0.5, min_examples=2)
    return TaskStream.split_classes(
        train, test, tasks=[3, 3, 4], clients=clients, partition=partition, seed=seed, **_BATCH
    )


def classifier(data_dir: Path | None) -> dict[str, Any]:
    """A small convolutional net and SGD."""
    return {"net": SmallConvNet(in_channels=1 if data_dir is None else 3), "lr": 0.05}


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="fedadb",
            about="FedADB, cross-silo: one task, Dirichlet 0.1, 5 local epochs. Scaled down: a small net without "
            "BatchNorm, plain SGD at 0.05, batches of 16.",
            stream=one_task,
            module=ImageClassifier,
            options=classifier,
            clients=20,
            sampled=0.2,
            rounds=300,
            local_epochs=5,
            lr_decay=0.99,
            # of one task
            leave_out=(
                "Fine-tuning",
                "FedAvg, all data so far",
                "SPECIAL",
                "SPECIAL-C",
                "EWC",
                "SI",
                "GEM",
                "A-GEM",
                "LwF",
            ),
            published=FEDADB_SILO,
        ),
        Suite(
            name="special",
            about="SPECIAL, Digit-10: four domains, 8 clients of which 4 take part, Dirichlet 0.1, 20 rounds of 5 "
            "local epochs. Scaled down: a small net without BatchNorm, SGD at 0.05, batches of 16.",
            stream=four_domains,
            module=ImageClassifier,
            options=classifier,
            clients=8,
            sampled=0.5,
            rounds=20,
            local_epochs=5,
            lr_decay=0.96,
            published=SPECIAL_DIGIT10,
        ),
        Suite(
            name="fedcmm",
            about="FedCMM: three tasks of new classes, 10 clients of which 5 take part, Dirichlet 0.5, 50 rounds of "
            "one local epoch. Scaled down: digits in the place of posts, a small net in the place of a language model.",
            stream=new_classes,
            module=ImageClassifier,
            options=classifier,
            clients=10,
            sampled=0.5,
            rounds=50,
            local_epochs=1,
            lr_decay=0.99,
            published=FEDCMM_PHEME,
        ),
    )
}
"""Suites by their name on the command line."""
