"""One client's training on two ranks: through an engine, and written out by hand in plain torch."""

from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_fcl.federated.engines.deepspeed import DeepSpeedEngine
from lightning_fcl.federated.engines.fsdp2 import fsdp2
from lightning_fcl.federated.engines.strategy import StrategyEngine
from lightning_fcl.testing import CPUDeepSpeedStrategy

ALL = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
CPU = torch.device("cpu")


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
    norm: bool = False  # a BatchNorm layer
    tied: bool = False  # two layers share their weight


class Net(L.LightningModule):
    """Sizes that two ranks do not divide, a parameter of its own, and a step that calls the module itself."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7) if case.norm else nn.ReLU(), nn.Linear(7, 3))
        self.heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.heads[1].requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor([1.5]))
        if case.tied:
            self.body[2].bias = self.heads[0].bias

    def forward(self, x):
        return self.heads[1](self.heads[0](self.body(x))) * self.temperature

    def training_step(self, batch, batch_idx):
        # Gradients of a norm above 1 would show DeepSpeed's silent clipping.
        return 10 * nn.functional.cross_entropy(self(batch[0]) * self.temperature, batch[1])

    def validation_step(self, batch, batch_idx):
        return self(batch[0]) + self.temperature

    def configure_optimizers(self):
        free = [] if self.case.tied else [self.heads[0].bias]
        groups = [{"params": self.body.parameters()}, {"params": [self.heads[0].weight, *free, self.temperature]}]
        if self.case.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.01)
        if self.case.optimizer == "adagrad":
            return torch.optim.Adagrad(
                (p for p in self.parameters() if p.requires_grad), 0.1, initial_accumulator_value=1
            )
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
    """The contiguous share of one rank."""
    n = len(batch[0])
    return [part[n * rank // world : n * (rank + 1) // world] for part in batch]


def schedule(optimizer, case):
    """A schedule that also moves the momentum, or one that does nothing."""
    if not case.scheduler:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=case.steps + 1)


# -- the reference: plain torch on one rank's share, or on the whole batch ------------------------------------------


def train_plainly(client, case, *, world=1, each=False):
    """Data parallel by hand: gradients are averaged by one all_reduce.

    ``each``: after every micro-batch, as ZeRO-2 and ZeRO-3 do, instead of once before the step.
    """
    net = new_net(case)
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = net.configure_optimizers()
    scheduler = schedule(optimizer, case)
    for micro_batches in batches_of(client, case):
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        for batch in micro_batches:
            backward_on_share(net, batch, world)
            if each or batch is micro_batches[-1]:
                average_into(total, params, world)
        for name, p in params.items():
            p.grad = total[name] + case.pull * p.detach() if case.pull else total[name]
        if case.clip:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach().clone() for name, p in params.items()}


def backward_on_share(net, batch, world):
    x, y = share(batch, dist.get_rank(), world) if world > 1 else batch
    loss = net.training_step((x, y), 0) / net.case.accumulate
    if len(x) * world != len(batch[0]):
        loss = loss * (len(x) * world / len(batch[0]))
    loss.backward()


def average_into(total, params, world):
    for name, p in params.items():
        if world > 1:
            dist.all_reduce(p.grad)
        total[name] += p.grad / world
        p.grad = None


# -- the engines ----------------------------------------------------------------------------------------------------


def make_engine(name, case, module=None, **options):
    zero = name.startswith("zero")
    strategy = CPUDeepSpeedStrategy(stage=int(name[4:])) if zero else {"ddp": "ddp", "fsdp2": fsdp2()}[name]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    engine = (DeepSpeedEngine if zero else StrategyEngine)(fabric, gradient_clip_val=case.clip, **options)
    engine.setup(new_net(case) if module is None else module)
    return engine


def load_start(engine, case):
    net = new_net(case)
    with torch.no_grad():
        engine.load(engine.layout.pack({**dict(net.named_parameters()), **dict(net.named_buffers())}, row(engine)))


def row(engine):
    return engine.layout.new_vector(CPU)


def run_job(engine, client, case, fail_at=None):
    """What the client loop does, in short."""
    load_start(engine, case)
    optimizer = engine.module.configure_optimizers()
    scheduler = schedule(optimizer, case)
    (optimizer,) = engine.attach_optimizers([optimizer])
    for step, micro_batches in enumerate(batches_of(client, case)):
        optimizer.zero_grad()
        for batch in micro_batches[:-1]:
            with engine.accumulating(True):
                backward(engine, batch)
        if step == fail_at:
            raise ArithmeticError("on purpose")
        closure = partial(backward, engine, micro_batches[-1])
        engine.optimizer_step(optimizer, closure, partial(after, engine, optimizer, case))
        scheduler.step()
    return values(engine)


def backward(engine, batch):
    x, y = share(batch, *engine.shard)
    loss = engine.training_step((x, y), 0) / engine.module.case.accumulate
    engine.backward(engine.scale_loss(loss, len(x), len(batch[0])))
    return loss


def after(engine, optimizer, case):
    if case.pull:
        engine.add_to_gradients({name: case.pull * value for name, value in engine.weights().items()})
    if case.clip and not engine.clips_gradients:
        engine.clip_gradients(optimizer, case.clip, "norm")


def values(engine):
    out = row(engine)
    engine.read(out)
    return {name: view.clone() for name, view in engine.layout.views(out).items()}
