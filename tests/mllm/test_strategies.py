"""A LLaVA-like model whose weights or optimiser two processes share: the loss curve of one process, whole adapters."""

import gc

import pytest
import torch

from lightning_fcl import FederatedTrainer, ServerCallback
from lightning_fcl.data.fcit import fcit_stream
from lightning_fcl.federated.engines.fsdp2 import fsdp2, shard_layers
from lightning_fcl.mllm import LoRA, MultimodalInstructionModule
from lightning_fcl.models import subspace_layers
from lightning_fcl.reports.files import read_table
from lightning_fcl.suites.fcit import fcit_module, fcit_rules
from lightning_fcl.testing import CPUDeepSpeedStrategy
from tests.helpers.llava import save_random_llava

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT asks transformers 5 for it
]

SHARDED = ["zero2", "zero3", "fsdp2"]
TASKS = ["odd", "same"]  # answers of one token, so that each rank's share of a batch has as many as the other's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llava(tmp_path_factory.mktemp("llava"))


def stream(clients=2):
    return fcit_stream(tasks=TASKS, beta=5.0, train_size=24, test_size=3, clients=clients, batch_size=4)


def make(folder, method):
    if method == "disco":
        return fcit_module("disco", folder, stages=2, rank=2, lr=1e-2, dropout=0.0, max_new_tokens=1)
    torch.manual_seed(0)
    options = {"lora": LoRA(rank=2, alpha=4, dropout=0.0), "lr": 1e-2, "max_new_tokens": 1}
    return MultimodalInstructionModule.from_pretrained(folder, **options)


def machine(name):
    if name == "alone":
        return {"devices": 1}
    strategy = CPUDeepSpeedStrategy(stage=int(name[4:])) if name.startswith("zero") else fsdp2(shard_layers)
    return {"devices": 2, "parallel": "model", "strategy": strategy}


def fit(folder, run_dir, method, name):
    """Train; returns the losses of the rounds, the weights that were trained, and logits of the module afterwards."""
    module, data = make(folder, method), stream()
    rules = fcit_rules("disco", module, threshold=0.5) if method == "disco" else {}
    trainer = FederatedTrainer(
        rounds=2, clients_per_round=2, local_epochs=1, accelerator="cpu", run_dir=run_dir, score="val_acc",
        enable_progress_bar=False, **machine(name), **rules,
    )  # fmt: skip
    trainer.fit(module, data)
    losses = [float(row["client/train_loss"]) for row in read_table(run_dir / "metrics.csv")[1]]
    weights = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    if method == "disco":
        weights = {
            f"{n}.{i}": part for n, layer in subspace_layers(module).items() for i, part in enumerate(layer.bank)
        }
    elif trainer.is_global_zero:
        module.model.save_pretrained(run_dir / "adapter")
    return losses, weights, logits(module.eval(), method)


def batch(module):
    return module.on_before_batch_transfer(next(iter(stream().eval_loader(0))), 0)


@torch.no_grad()
def logits(module, method):
    """Of the first subspace alone, or of the one adapter."""
    for layer in subspace_layers(module).values():
        layer.activate(torch.eye(2)[:1])
    return module(batch(module))


@torch.no_grad()
def reopened(folder, adapter):
    """Logits of the base model with an adapter that PEFT itself opens."""
    module = MultimodalInstructionModule.from_pretrained(folder, lora=None)
    module.model = peft.PeftModel.from_pretrained(module.model, str(adapter))
    return module.eval()(batch(module))


@pytest.fixture(scope="module", params=["lora", "disco"])
def alone(request, folder, tmp_path_factory):
    return request.param, fit(folder, tmp_path_factory.mktemp("alone"), request.param, "alone")


@pytest.mark.parametrize("name", SHARDED)
def test_two_processes_learn_as_one_does_and_save_whole_adapters(ranks, folder, alone, tmp_path, name):
    method, (losses, weights, _) = alone
    (one, two) = ranks.run(fit, folder, tmp_path / "run", method, name, timeout=280.0)
    assert len(losses) == 4
    assert losses[0] > losses[1]
    assert one[0] == pytest.approx(losses, abs=1e-5)
    for key, value in weights.items():
        assert torch.equal(one[1][key], two[1][key])
        torch.testing.assert_close(one[1][key], value, rtol=0, atol=1e-4)
    saved = "adapters/task_01/subspace_00" if method == "disco" else "adapter"
    torch.testing.assert_close(reopened(folder, tmp_path / "run" / saved), one[2], rtol=0, atol=1e-6)


# -- twenty clients, one after another --------------------------------------------------------------------------------


ROUNDS_TO_LOOK = (4, 9, 14, 18)  # counted from 0; the last round has an evaluation of its own


class Census(ServerCallback):
    """Counts what is alive after each round."""

    needs_weights = False  # or the engine would be taken down for a look at them

    def __init__(self):
        self.counts = []
        self.before = engines(gc.get_objects())  # of earlier tests in the same processes

    def on_round_end(self, trainer, pl_module):
        if trainer.state.global_round not in ROUNDS_TO_LOOK:
            return
        gc.collect()
        alive = gc.get_objects()
        tensors = [o for o in alive if issubclass(type(o), torch.Tensor)]
        self.counts.append(
            {
                "tensors": len(tensors),
                "bytes": sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()),
                "optimizers": sum(issubclass(type(o), torch.optim.Optimizer) for o in alive),
                "engines": engines(alive) - self.before,
            }
        )


def engines(alive):
    return sum(type(one).__name__ == "DeepSpeedEngine" and hasattr(one, "optimizer") for one in alive)


def switch_clients(folder, run_dir, name):
    """Twenty rounds of one client each, from two clients; what is alive after each."""
    census, module = Census(), make(folder, "lora")
    data = fcit_stream(tasks=TASKS[:1], beta=5.0, train_size=8, test_size=1, clients=2, batch_size=4)
    trainer = FederatedTrainer(
        rounds=20, clients_per_round=1, accelerator="cpu", run_dir=run_dir, score="val_acc", server_callbacks=census,
        enable_progress_bar=False, measure_baseline=False, checkpoint_every=0, limit_train_batches=1, **machine(name),
    )  # fmt: skip
    trainer.fit(module, data)
    return census.counts


def assert_constant(counts):
    assert counts == [counts[0]] * len(ROUNDS_TO_LOOK)


def test_twenty_client_switches_leave_nothing_behind(folder, tmp_path):
    assert_constant(switch_clients(folder, tmp_path, "alone"))


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_one_engine_serves_twenty_clients_and_nothing_is_left_behind(ranks, folder, tmp_path, name):
    for counts in ranks.run(switch_clients, folder, tmp_path, name, timeout=280.0):
        assert_constant(counts)
        assert counts[-1]["engines"] == 1
