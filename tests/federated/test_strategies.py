"""Engines of ``parallel="model"`` on two ranks, against the same maths written out by hand."""

import copy
from dataclasses import dataclass

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_fcl.federated.engines.deepspeed import DeepSpeedEngine
from lightning_fcl.federated.engines.strategy import StrategyEngine, fsdp2
from lightning_fcl.testing.deepspeed_cpu import CPUDeepSpeedStrategy
from tests.helpers.ranks import ranks

__all__ = ["ranks"]

ALL = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
ZERO = ["zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Case:
    """How a client trains; its batches come from its number."""

    optimizer: str = "sgd"
    clip: float | None = None
    accumulate: int = 1
    steps: int = 4
    batch_size: int = 7  # odd, so that the ranks' shares differ
    pull: float = 0.0  # strength of a penalty added to the gradients
    scheduler: bool = False


class Net(L.LightningModule):
    """Odd sizes that no number of ranks divides, a parameter of its own, and a step that calls the module itself."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.body = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        self.heads = nn.ModuleList([nn.Linear(3, 3)])
        self.temperature = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return self.heads[0](self.body(x)) * self.temperature

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]) * self.temperature, batch[1])

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters()}, {"params": [*self.heads.parameters(), self.temperature]}]
        if self.case.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)
        if self.case.optimizer == "adagrad":
            return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.1)
        return torch.optim.AdamW(groups, lr=0.05)


def new_net(case):
    torch.manual_seed(1)
    return Net(case)


def batches_of(client, case):
    stream = torch.Generator().manual_seed(client)
    for _ in range(case.steps):
        x = torch.randn(case.accumulate, case.batch_size, 5, generator=stream)
        y = torch.randint(3, (case.accumulate, case.batch_size), generator=stream)
        yield list(zip(x, y, strict=True))


def share(batch, rank, world):
    """The contiguous share of one rank, the larger ones first."""
    return [part.tensor_split(world)[rank] for part in batch]


def penalty(params, case):
    return {name: case.pull * value for name, value in params.items()}


# -- the two references ---------------------------------------------------------------------------------------------


def train_alone(client, case, start=None):
    """One process, whole batches, plain torch."""
    return _train_plainly(client, case, start, rank=0, world=1, each=False)


def train_by_hand(client, case, start=None, each=False):
    """Data parallel in plain torch: each rank its share, gradients averaged by one all_reduce.

    ``each``: average after each micro-batch, as ZeRO-2 and ZeRO-3 do, instead of once before the step.
    """
    return _train_plainly(client, case, start, dist.get_rank(), dist.get_world_size(), each)


def _train_plainly(client, case, start, rank, world, each):
    net = new_net(case)
    params = dict(net.named_parameters())
    if start is not None:
        net.load_state_dict(start)
    optimizer = net.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.steps) if case.scheduler else None
    for micro_batches in batches_of(client, case):
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        for batch in micro_batches:
            x, y = share(batch, rank, world)
            loss = net.training_step((x, y), 0)
            if len(x) * world != len(batch[0]):
                loss = loss * (len(x) * world / len(batch[0]))
            (loss / case.accumulate).backward()
            if each or batch is micro_batches[-1]:
                for name, p in params.items():
                    dist.all_reduce(p.grad) if world > 1 else None
                    total[name] += p.grad / world
                    p.grad = None
        for name, p in params.items():
            p.grad = total[name]
            if case.pull:
                p.grad += penalty({name: p.detach()}, case)[name]
        if case.clip:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return {name: p.detach().clone() for name, p in params.items()}


# -- the engines ----------------------------------------------------------------------------------------------------


def make_engine(name, case, **options):
    zero = name.startswith("zero")
    strategy = CPUDeepSpeedStrategy(stage=int(name[4:])) if zero else {"ddp": "ddp", "fsdp2": fsdp2()}[name]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    engine = (DeepSpeedEngine if zero else StrategyEngine)(fabric, gradient_clip_val=case.clip, **options)
    engine.setup(new_net(case))
    return engine


def run_job(engine, client, case, start=None):
    """What the client loop does, in short."""
    rank, world = engine.shard
    fresh = engine.layout.new_vector(torch.device("cpu"))
    start = dict(new_net(case).named_parameters()) if start is None else start
    with torch.no_grad():
        engine.load(engine.layout.pack(start, fresh))
    optimizer = engine.module.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.steps) if case.scheduler else None
    (optimizer,) = engine.attach_optimizers([optimizer])

    for micro_batches in batches_of(client, case):
        optimizer.zero_grad()

        def forward_and_backward(micro_batches=micro_batches):
            for batch in micro_batches:
                with engine.accumulating(batch is not micro_batches[-1]):
                    x, y = share(batch, rank, world)
                    loss = engine.training_step((x, y), 0)
                    loss = engine.scale_loss(loss, len(x), len(batch[0]))
                    engine.backward(loss / case.accumulate)
            return loss

        def after():
            if case.pull:
                names = [slot.name for slot in engine.layout.slots]
                engine.add_to_gradients(penalty(engine.get_tensors(names), case))
            if case.clip and not engine.clips_gradients:
                engine.clip_gradients(optimizer, case.clip, "norm")

        engine.optimizer_step(optimizer, forward_and_backward, after)
        if scheduler is not None:
            scheduler.step()
    out = engine.layout.new_vector(torch.device("cpu"))
    engine.read(out)
    return {name: view.clone() for name, view in engine.layout.views(out).items()}


def compare(name, case, each):
    engine = make_engine(name, case)
    result = run_job(engine, 3, case)
    engine.teardown()
    return result, train_by_hand(3, case, each=each), train_alone(3, case)


def switch(name, case):
    engine = make_engine(name, case)
    together = [run_job(engine, client, case) for client in (1, 2, 1)]
    engine.teardown()
    other = make_engine(name, case)
    fresh = run_job(other, 2, case)
    other.teardown()
    return together, fresh


def bits(one, two):
    assert one.keys() == two.keys()
    differ = [name for name in one if not torch.equal(one[name], two[name])]
    assert not differ, {n: (one[n] - two[n]).abs().max().item() for n in differ}


def close(one, two, atol=1e-6):
    torch.testing.assert_close(one, two, rtol=0, atol=atol)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ALL)
def test_equals_hand_made_data_parallel_bit_for_bit(ranks, name, optimizer):
    (one, hand, alone), (two, _, _) = ranks.run(compare, name, Case(optimizer, scheduler=True), False)
    bits(one, two)
    bits(one, hand)
    close(one, alone)


@pytest.mark.parametrize("name", ALL)
def test_switching_clients_leaves_no_trace(ranks, name):
    (first, second, again), fresh = ranks.run(switch, name, Case("adamw"))[0]
    bits(first, again)
    bits(second, fresh)
    assert not torch.equal(first["body.0.weight"], second["body.0.weight"])
