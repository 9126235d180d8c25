"""What can be wrong with FCIT's files, adapters and clients: one clear line, before any training.

A NaN client, tokens of unequal size and more tasks than subspaces are in ``tests/methods/test_disco.py``.
"""

import json

import numpy as np
import pytest
import torch

from lightning_fcl import FederatedTrainer, TaskStream
from lightning_fcl.data.fcit import fcit_stream
from lightning_fcl.data.instructions import as_list
from lightning_fcl.data.partition import Partitioner
from lightning_fcl.exceptions import CheckpointError, DatasetError
from lightning_fcl.models import load_subspaces, save_subspaces, subspace_layers
from lightning_fcl.suites.fcit import fcit_module, fcit_rules

transformers = pytest.importorskip("transformers")
from tests.helpers.llava import save_random_llava  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llava(tmp_path_factory.mktemp("llava"))


def make(folder, **options):
    return fcit_module("disco", folder, stages=2, rank=2, lr=1e-2, max_new_tokens=1, **options)


def rows(task="odd", size=4):
    return fcit_stream(tasks=[task], train_size=size, test_size=2, clients=1)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def data_dir(tmp_path):
    """A folder with one task of four rows."""
    from PIL import Image

    folder = tmp_path / "data" / "colours"
    folder.mkdir(parents=True)
    lines = []
    for number in range(4):
        Image.fromarray(np.full((8, 8, 3), 60 * number, dtype=np.uint8)).save(folder / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhich colour?"}, {"from": "gpt", "value": "grey"}]
        lines.append(json.dumps({"id": str(number), "image": f"{number}.png", "conversations": turns}))
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "data"


def test_a_missing_and_a_truncated_picture_are_named_before_training(data_dir):
    picture = data_dir / "colours" / "2.png"
    picture.write_bytes(picture.read_bytes()[:40])
    with pytest.raises(DatasetError, match=r"train\.jsonl.*2\.png"):
        fcit_stream(data_dir=data_dir, clients=2)
    picture.unlink()
    with pytest.raises(DatasetError, match=r"train\.jsonl.*2\.png"):
        fcit_stream(data_dir=data_dir, clients=2)


def test_more_clients_than_examples_are_refused(data_dir):
    with pytest.raises((DatasetError, ValueError), match="4"):
        fcit_stream(data_dir=data_dir, clients=5)


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(folder, tmp_path):
    """A module with one subspace, as a run leaves it, and its folder."""
    module = make(folder)
    slot = {f"{n}.lora_{f}": getattr(m, f"lora_{f}").detach() for n, m in subspace_layers(module).items() for f in "AB"}
    batch = module.on_before_batch_transfer(next(iter(rows().eval_loader(0))), 0)
    module.install_subspaces([slot], module.identity_features(batch)[:1])
    save_subspaces(module, tmp_path / "adapters")
    return module, tmp_path / "adapters"


def test_a_fresh_module_opens_what_a_run_saved(saved, folder):
    module, path = saved
    fresh = make(folder)
    load_subspaces(fresh, path)
    assert torch.equal(fresh.subspace_tokens, module.subspace_tokens)


def test_adapters_of_another_base_model_are_refused(saved, folder, tmp_path):
    other = save_random_llava(tmp_path / "other", width=64)
    with pytest.raises(CheckpointError, match="another base model"):
        load_subspaces(make(other), saved[1])
    changed = make(folder)
    next(iter(subspace_layers(changed).values())).base.weight.data.mul_(1.5)
    with pytest.raises(CheckpointError, match="another base model"):
        load_subspaces(changed, saved[1])


def test_tokens_of_another_encoder_are_refused(saved, folder):
    with pytest.raises(CheckpointError, match=r"made from text by QuestionEmbeddings, but .* compares image by"):
        load_subspaces(make(folder, routing_source="image"), saved[1])
    with pytest.raises(CheckpointError, match=r"compares text by function"):
        load_subspaces(make(folder, routing_encoder=lambda batch: torch.ones(1, 3)), saved[1])


@pytest.mark.parametrize("source", ["text", "image", "both"])
def test_every_source_tells_what_it_compares(folder, source):
    module = make(folder, routing_source=source)
    batch = module.on_before_batch_transfer(next(iter(rows().eval_loader(0))), 0)
    width = {"text": 32, "image": 32, "both": 64}[source]
    assert module.identity_features(batch).shape == (2, width)


# -- clients ----------------------------------------------------------------------------------------------------------


class AllToOne(Partitioner):
    min_examples = 0

    def __call__(self, examples, clients, rng):
        return np.zeros(len(examples), dtype=np.int64)


def test_a_client_without_examples_takes_no_part(folder, tmp_path):
    data = [row for batch in rows().eval_loader(0) for row in batch]
    stream = TaskStream.from_datasets([data], [data], clients=2, partition=AllToOne(), batch_size=2, collate_fn=as_list)
    assert stream.clients(0) == [0]
    module = make(folder)
    trainer = FederatedTrainer(
        rounds=1, clients_per_round=2, accelerator="cpu", devices=1, run_dir=tmp_path / "run", score="val_acc",
        enable_progress_bar=False, measure_baseline=False, **fcit_rules("disco", module, threshold=0.5),
    )  # fmt: skip
    trainer.fit(module, stream)
    assert module.num_subspaces == 1
