"""What every method must be able to do, as checks that walk the classes that carry a card."""

import contextlib
import copy
import importlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fcl.aggregators.base import Reducer, ServerStep
from lightning_fcl.aggregators.router import Router
from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.callbacks.fault_injector import FaultInjector
from lightning_fcl.data.partition import Shards
from lightning_fcl.data.stream import TaskStream
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.describe import describe
from lightning_fcl.federated.trainer import FederatedTrainer
from lightning_fcl.mixins.embedding_forward import EmbeddingForwardMixin
from lightning_fcl.mixins.subspace_routing import SubspaceRoutingMixin
from lightning_fcl.models.subspace_lora import add_subspaces, subspace_layers

ROOMS = ("aggregators", "callbacks", "mixins")
PLAIN_FILES = {".safetensors", ".json", ".csv", ".yaml", ".html", ".png"}


class ConformanceModule(L.LightningModule):
    """A small classifier of three classes with parts that methods ask for by name.

    Inputs have shape ``[B, 6]``; ``vision`` reads the first half, ``language`` the second, ``projector`` joins them,
    ``head`` is the last ``nn.Linear``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(3, 8)
        self.language = nn.Linear(3, 8)
        self.projector = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape ``[B, 3]``."""
        joined = torch.cat([self.vision(x[:, :3]), self.language(x[:, 3:])], dim=1)
        logits: Tensor = self.head(self.projector(joined.relu()))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy, mean over the batch."""
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs ``val_acc``."""
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class SubspaceModule(SubspaceRoutingMixin, ConformanceModule):
    """The same with LoRA subspaces in its first layers, all else frozen; tasks are told apart by where inputs lie."""

    def __init__(self) -> None:
        super().__init__()
        self.projector[1] = nn.Identity()  # whose statistics would travel
        add_subspaces(self, ["vision", "language"], rank=2)

    def identity_features(self, batch: Any) -> Tensor:
        """The inputs as they are, shape ``[B, 6]``."""
        features: Tensor = batch[0]
        return features

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD over the subspaces."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def base_of(method: type) -> type[L.LightningModule]:
    """The module to try a method in."""
    needs = method.card.needs  # type: ignore[attr-defined]
    if "a way in for embeddings" in needs:
        return _mixed(EmbeddingForwardMixin, ConformanceModule)
    return SubspaceModule if "subspace layers" in needs else ConformanceModule


def conformance_stream() -> TaskStream:
    """Two tasks of three blobs over four unlike clients; in the second task the blobs have moved and changed names."""
    train = [_blobs(64, seed=task, task=task) for task in range(2)]
    test = [_blobs(30, seed=90 + task, task=task) for task in range(2)]
    return TaskStream.from_datasets(train, test, clients=4, batch_size=8, partition=Shards(2))


def _blobs(examples: int, seed: int, task: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(99))
    blob = torch.randint(0, 3, (examples,), generator=generator)
    inputs = centres[blob] + task + torch.randn(examples, 6, generator=generator)
    return TensorDataset(inputs, (blob + task) % 3)


def method_classes() -> list[type]:
    """Every public class of the library that carries a card, sorted by name."""
    found: dict[str, type] = {}
    for room in ROOMS:
        package = importlib.import_module(f"lightning_fcl.{room}")
        for name, thing in vars(package).items():
            if isinstance(thing, type) and "card" in vars(thing):
                found[name] = thing
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True)
class Finished:
    """A finished run: where it lies, and the state of the module at its end."""

    run_dir: Path
    weights: dict[str, Tensor]


class Shell:
    """Runs one method in a small federation.

    Args:
        method: The class, with a card.
        run_dir: Folder for the run folders.
        base: Module class to use, by default that of :func:`base_of`; a mixin is put left of it.
    """

    def __init__(self, method: type, run_dir: Path, base: type[L.LightningModule] | None = None) -> None:
        self.method = method
        self.card = method.card  # type: ignore[attr-defined]
        self.run_dir = run_dir
        self.base = base_of(method) if base is None else base

    def run(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        *,
        ckpt_path: str | None = None,
        beside: tuple[L.Callback, ...] = (),
        **options: Any,
    ) -> Finished:
        """Two tasks of two rounds with three of four clients; the same seeds whatever the method."""
        module, pieces = self._pieces(arguments)
        settings: dict[str, Any] = {
            "rounds": 2,
            "clients_per_round": 3,
            "accelerator": "cpu",
            "devices": 1,
            "enable_progress_bar": False,
            "measure_baseline": False,
            **options,
        }
        callbacks = [*pieces.pop("callbacks", []), *beside]
        trainer = FederatedTrainer(run_dir=self.run_dir / name, callbacks=callbacks, **pieces, **settings)
        trainer.fit(module, conformance_stream(), ckpt_path)
        return Finished(trainer.run_dir, {key: value.clone() for key, value in _all_weights(module).items()})

    def make(self, arguments: dict[str, Any] | None = None) -> Any:
        """The method's object; of a mixin, a module that has it."""
        arguments = dict(self.card.smoke if arguments is None else arguments)
        if not issubclass(self.method, L.LightningModule):
            return self.method(**arguments)
        torch.manual_seed(0)
        return _mixed(self.method, self.base)(**arguments)

    def _pieces(self, arguments: dict[str, Any] | None) -> tuple[L.LightningModule, dict[str, Any]]:
        made = self.make(arguments)
        if isinstance(made, L.LightningModule):
            return made, {}
        torch.manual_seed(0)
        if isinstance(made, Router | Reducer | ServerStep):
            return self.base(), {"aggregator": made}
        return self.base(), {"server_callbacks" if isinstance(made, ServerCallback) else "callbacks": [made]}


def _all_weights(module: L.LightningModule) -> dict[str, Tensor]:
    """The module's state, and the subspaces installed in it."""
    banks = {name: layer.bank for name, layer in subspace_layers(module).items() if layer.bank is not None}
    return {
        **module.state_dict(),
        **{f"{name}.bank.{i}": t for name, bank in banks.items() for i, t in enumerate(bank)},
    }


def _mixed(mixin: type, base: type) -> type:
    """``class MixinBase(Mixin, Base)``, where pickle can find it."""
    name = mixin.__name__ + base.__name__
    if name not in globals():
        globals()[name] = type(name, (mixin, base), {"__module__": __name__})
    made: type = globals()[name]
    return made


def check_effect(shell: Shell, smoked: Finished, plain: Finished) -> None:
    """With its smoke arguments the method leaves other weights behind than plain FedAvg."""
    changed = _differences(plain, smoked)
    assert changed, f"{shell.card.name} with {dict(shell.card.smoke)} ends with the weights of plain FedAvg"


def check_neutral(shell: Shell, plain: Finished) -> None:
    """With its neutral arguments the method equals plain FedAvg bit for bit."""
    different = _differences(plain, shell.run("neutral", dict(shell.card.neutral)))
    assert not different, f"{shell.card.name} with {dict(shell.card.neutral)} differs from FedAvg in {different}"


def check_resume(shell: Shell, smoked: Finished) -> None:
    """Stopped in the second task and resumed, the run ends with the same weights and the same metrics.csv."""
    stopped = False
    try:
        shell.run("resumed", beside=(FaultInjector("exception", task=1, round=1),))
    except RuntimeError as error:
        stopped = "injected fault" in str(error)
    assert stopped, f"{shell.card.name}: the run that was to be stopped was not"
    resumed = shell.run("resumed", ckpt_path="last")
    different = _differences(smoked, resumed)
    assert not different, f"{shell.card.name}: after a resume other weights in {different}"
    assert (resumed.run_dir / "metrics.csv").read_bytes() == (smoked.run_dir / "metrics.csv").read_bytes()


def check_files(shell: Shell, smoked: Finished) -> None:
    """The run folder holds nothing that must be unpickled."""
    strange = [p.name for p in smoked.run_dir.rglob("*") if p.is_file() and p.suffix not in PLAIN_FILES]
    assert not strange, f"{shell.card.name}: the run folder holds {strange}"


def check_copies(shell: Shell) -> None:
    """The method's object can be deep-copied and pickled."""
    made = shell.make()
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(twin) is type(made)
        assert describe(twin) == describe(made), f"a copy of {shell.card.name} has other settings"


def check_two_instances(shell: Shell, smoked: Finished) -> None:
    """Nothing stays behind in the class: a second run of a second object in the same process is the same run.

    A callback with a neutral setting must also bear one of those beside it, or refuse it before any work starts.
    """
    again = None
    if shell.card.neutral is not None and issubclass(shell.method, L.Callback):
        with contextlib.suppress(MisconfigurationError):
            again = shell.run("beside", beside=(shell.make(shell.card.neutral),))
    again = again or shell.run("again")
    different = _differences(smoked, again)
    assert not different, f"{shell.card.name}: a second object in the same process ends with other {different}"


def _differences(first: Finished, second: Finished) -> list[str]:
    names = first.weights.keys() | second.weights.keys()
    pairs = {name: (first.weights.get(name), second.weights.get(name)) for name in names}
    return sorted(n for n, (a, b) in pairs.items() if a is None or b is None or not torch.equal(a, b))
