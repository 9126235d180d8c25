"""What a client's job costs, counted and not timed: steps, calls of torch, and tensors as large as the model."""

from collections import Counter

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from lightning_fcl import FederatedTrainer, ServerCallback, TaskStream

WIDTH = 4_000  # of the only layer, so that nothing else is as large
STEPS = 3
MEMORY = ("aten.empty", "aten.new_empty", "aten.zeros", "aten.clone", "aten.copy_", "aten._to_copy")


class Count(TorchDispatchMode):
    """Counts calls of torch's operators, and those of them that write as much as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.large = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        name = str(func).rsplit(".", 1)[0]
        self.calls[name] += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.numel() >= WIDTH * 2 and name.startswith(MEMORY):
                self.large[name] += 1
        return result


class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.layer(batch[0].expand(-1, WIDTH)), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("acc", 0.0)

    def on_before_optimizer_step(self, optimizer):
        self.steps += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class CountRounds(ServerCallback):
    """Counts from the sampling of clients to the new weights, without the first round, which allocates what stays."""

    needs_weights = False

    def __init__(self):
        self.mode = None

    def on_round_start(self, trainer, pl_module):
        self.mode = Count() if trainer.state.round else None
        self.steps = pl_module.steps
        if self.mode:
            self.mode.__enter__()

    def on_after_aggregate(self, trainer, pl_module):
        if self.mode:
            self.mode.__exit__(None, None, None)
        self.steps = pl_module.steps - self.steps


def work(clients, tmp_path):
    """Steps, calls and large copies of one round of so many clients."""
    data = TensorDataset(torch.ones(clients * STEPS, 1), torch.zeros(clients * STEPS, dtype=torch.long))
    stream = TaskStream.from_datasets([data], [data], clients=clients, batch_size=1)
    counter = CountRounds()
    options = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "measure_baseline": False}
    trainer = FederatedTrainer(
        rounds=2, clients_per_round=clients, server_callbacks=[counter], run_dir=tmp_path / str(clients), **options
    )
    trainer.fit(Wide(), stream)
    return counter.steps, counter.mode.calls, counter.mode.large


@pytest.fixture(scope="module")
def per_client(tmp_path_factory):
    """The same, per client: what 16 clients cost more than 8, so that a round's own work falls out."""
    path = tmp_path_factory.mktemp("work")
    (few, few_calls, few_large), (many, calls, large) = work(8, path), work(16, path)
    return {
        "steps": (many - few) / 8,
        "calls": {name: (calls[name] - few_calls[name]) / 8 for name in calls},
        "large": {name: (large[name] - few_large[name]) / 8 for name in large},
    }


def test_a_client_takes_its_steps_and_no_more(per_client):
    assert per_client["steps"] == STEPS
    assert per_client["calls"]["aten._log_softmax"] == STEPS
    assert per_client["calls"]["aten._log_softmax_backward_data"] == STEPS


def test_a_client_is_switched_by_three_copies(per_client):
    """Down into the replica, up out of it, into the slab: and the slab's sum in float64, once per eight clients."""
    large = per_client["large"]
    assert large["aten.copy_"] <= 3 + 4 / 8
    assert sum(count for name, count in large.items() if name != "aten.copy_") <= 4 / 8


def test_a_step_clears_no_gradient_and_copies_none(per_client):
    calls = per_client["calls"]
    assert not calls.get("aten.zero_")
    assert not calls.get("aten.clone")
    assert calls["aten._foreach_add_"] == STEPS


def test_calls_of_torch_per_step_stay_few(per_client):
    assert sum(per_client["calls"].values()) <= 40 * STEPS
