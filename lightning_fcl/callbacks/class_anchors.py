"""The server's half of FedADB: after each round it makes anchors of every class and sends them along."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_fcl._heads import call, find_head, inputs_and_targets, modes_kept, outputs_of, replaced_output
from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.class_anchors import AnchorSet, class_anchors, input_box
from lightning_fcl.serialize import tree_bytes

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer

_LEVELS = 255


class ClassAnchors(ServerCallback):
    """Makes class anchors from the global model before every round and sends them to its clients.

    Noise becomes one confident input per class by gradient descent through the global model in eval mode; no data are
    needed but the shape of one evaluation example. :class:`~lightning_fcl.mixins.DualBranchMixin` uses them on clients.
    Goes with any aggregator. Same (seed, task, round) and weights, same anchors. A round that changed nothing keeps the
    last ones. Logs ``anchors/quality``, ``anchors/kept`` (how many are sent) and ``anchors/bytes`` (per client).

    Args:
        per_class: Anchors of each class.
        steps: Steps of the descent.
        lr: Its step, in units of the normalised input.
        sigma: Standard deviation of the noise, in the same units.
        l2: Strength of the L2 term on the sum of an anchor's squared pixels; it grows with the resolution.
        mean: Mean of the data's normalisation, per channel or one number, for the box of valid pixels; ``None`` for no
            box. The default is that of pixels in [-1, 1].
        std: Its standard deviation.
        classes: ``"seen"``: labels of the training sets so far; ``"all"``: every output of the head; or a list.
        gate: Anchors below ``gate / C`` in confidence are not sent (at most half-way from chance to certainty): the
            model knows nothing of such a class yet. 0 sends all, as the paper does.
        warm_steps: Start from the last round's anchors and take so many steps; ``None`` starts from noise.
        uint8: Send one byte per value, on a grid between the bounds of the box (without a box, of the anchors).
        feature_module: Dotted name of the head; by default the module's own ``feature_module``, else its last linear
            layer.
        input_module: Dotted name of a module, such as an embedding, whose output the anchors replace; for inputs that
            are not differentiable. By default anchors are inputs.

    Raises:
        MisconfigurationError: If a number is out of range, or ``lr * l2 >= 1``; when training starts, if the module has
            no head, no ``forward``, or integer inputs.
    """

    def __init__(
        self,
        per_class: int = 1,
        *,
        steps: int = 100,
        lr: float = 1.0,
        sigma: float = 1.0,
        l2: float = 1e-3,
        mean: float | Sequence[float] | None = 0.5,
        std: float | Sequence[float] = 0.5,
        classes: Literal["seen", "all"] | Sequence[int] = "seen",
        gate: float = 2.0,
        warm_steps: int | None = None,
        uint8: bool = False,
        feature_module: str | None = None,
        input_module: str | None = None,
    ) -> None:
        if per_class < 1 or (warm_steps is not None and warm_steps < 1):
            raise MisconfigurationError(
                f"`per_class` and `warm_steps` must be at least 1, got {per_class} and {warm_steps}. Leave "
                "`warm_steps` out to start from noise."
            )
        if not 0 <= gate < math.inf:
            raise MisconfigurationError(f"`gate` must be finite and not negative, got {gate}. Use 0 to send all.")
        self.per_class = per_class
        self.steps = steps
        self.lr = lr
        self.sigma = sigma
        self.l2 = l2
        self.mean = mean
        self.std = std
        self.classes = classes
        self.gate = gate
        self.warm_steps = warm_steps
        self.uint8 = uint8
        self.feature_module = feature_module
        self.input_module = input_module
        class_anchors(lambda x: x, torch.zeros(0, dtype=torch.long), (1,), **self._settings(0))  # checks numbers
        self._box = None if mean is None or input_module is not None else input_box(mean, std)
        self._last: AnchorSet | None = None
        self._message: dict[str, Tensor] = {}
        self._known: dict[int, tuple[int, ...]] = {}

    def _settings(self, steps: int | None = None) -> dict[str, Any]:
        return {"steps": self.steps if steps is None else steps, "lr": self.lr, "sigma": self.sigma, "l2": self.l2}

    @override
    def on_fit_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        assert trainer.stream is not None
        self._known = {}
        if trainer.state.global_round == 0:  # else a resumed run goes on with what its commit holds
            self._last = None
        self._sample, _ = inputs_and_targets(next(iter(trainer.stream.eval_loader(0))))
        if type(pl_module).forward is L.LightningModule.forward:
            raise MisconfigurationError(
                f"`forward` must give logits of inputs, but {type(pl_module).__name__} does not define it. Move the "
                "call of the net out of `training_step`."
            )
        if self.input_module is None and not (isinstance(self._sample, Tensor) and self._sample.is_floating_point()):
            kind = self._sample.dtype if isinstance(self._sample, Tensor) else type(self._sample).__name__
            raise MisconfigurationError(
                f"`input_module` must name the embedding, since inputs are {kind} and cannot be descended on. Anchors "
                "then live at its output."
            )

    @override
    def on_round_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        if trainer.state.phase != "train":
            return
        _, head = find_head(pl_module, self.feature_module or getattr(pl_module, "feature_module", None))
        weight = next(head.parameters())
        classes = self._classes(trainer, head)
        targets = torch.tensor(classes, device=weight.device).repeat_interleave(self.per_class)
        last = self._last
        same = last is not None and torch.equal(last.targets.to(targets.device), targets)
        if not (same and trainer.state.empty_rounds):  # else the model, and so its anchors, are what they were
            warm = self.warm_steps if same and last is not None else None
            # The hook's own seed, however much other callbacks have drawn.
            generator = torch.Generator().manual_seed(torch.initial_seed())
            with modes_kept(pl_module, training=False), outputs_of(head) as seen:
                logits_fn, shape = self._logits_of(pl_module, head, seen)
                self._last = class_anchors(
                    logits_fn,
                    targets,
                    shape,
                    bounds=self._box,
                    generator=generator,
                    start=last.inputs if last is not None and warm is not None else None,
                    dtype=weight.dtype,
                    **self._settings(warm),
                )
        assert self._last is not None
        self._message = self._pack(self._last, classes)
        logs = {"quality": self._last.quality, "kept": len(self._message["targets"])}
        logs["bytes"] = tree_bytes(self._message)
        trainer.state.metrics.update({f"anchors/{name}": float(value) for name, value in logs.items()})

    @override
    def broadcast(self, trainer: "FederatedTrainer") -> dict[str, Tensor]:
        return self._message

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._last is None else self._last._asdict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last = AnchorSet(**state_dict) if state_dict else None

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _classes(self, trainer: "FederatedTrainer", head: nn.Module) -> tuple[int, ...]:
        task = trainer.state.task
        if task not in self._known:
            assert trainer.stream is not None
            outputs = getattr(head, "out_features", None)
            if self.classes == "all" and outputs is None:
                raise MisconfigurationError("`classes` must be 'seen' or a list, since the head is no linear layer.")
            named = self.classes if not isinstance(self.classes, str) else range(outputs or 0)
            self._known[task] = trainer.stream.classes(task) if self.classes == "seen" else tuple(named)
            if not self._known[task] or (outputs is not None and max(self._known[task]) >= outputs):
                raise MisconfigurationError(
                    f"`classes` must name outputs of the head (below {outputs}), got {self._known[task]}. Widen the "
                    "head, or number the labels from 0."
                )
        return self._known[task]

    def _logits_of(
        self, module: L.LightningModule, head: nn.Module, seen: list[Any]
    ) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]]:
        """What the descent differentiates, and the shape of one anchor."""

        def last_logits() -> Tensor:
            logits = seen[-1] if seen else None
            seen.clear()
            if not isinstance(logits, Tensor) or logits.dim() != 2:
                raise MisconfigurationError(
                    f"`feature_module` must name a layer that gives logits of shape (N, C) in every forward, got "
                    f"{tuple(logits.shape) if isinstance(logits, Tensor) else logits}. Name the classifier."
                )
            return logits

        if self.input_module is None:

            def of_inputs(x: Tensor) -> Tensor:
                call(module, x)
                return last_logits()

            return of_inputs, tuple(self._sample.shape[1:])
        _, layer = find_head(module, self.input_module)
        first = _rows(self._sample, 1, next(head.parameters()).device)
        with torch.no_grad(), outputs_of(layer) as embedded:
            call(module, first)
        seen.clear()

        def of_embeddings(x: Tensor) -> Tensor:
            with replaced_output(layer, lambda _, __: x):
                call(module, _rows(first, len(x), x.device))
            return last_logits()

        return of_embeddings, tuple(embedded[-1].shape[1:])

    def _pack(self, anchors: AnchorSet, classes: tuple[int, ...]) -> dict[str, Tensor]:
        limit = min(self.gate / len(classes), (1 + 1 / len(classes)) / 2) if self.gate else 0.0
        kept = anchors.confidence >= limit
        message = {
            "inputs": anchors.inputs[kept],
            "targets": anchors.targets[kept],
            "confidence": anchors.confidence[kept],
            "quality": torch.tensor(anchors.quality, dtype=torch.float64),
            "classes": torch.tensor(classes),
        }
        if self.uint8 and len(message["inputs"]):
            values = message["inputs"]
            low, high = self._box if self._box is not None else values.float().aminmax()
            low, high = low.to(values.device), high.to(values.device)
            levels = ((values.float() - low) / (high - low).clamp_min(1e-12) * _LEVELS).round()
            message |= {"inputs": levels.to(torch.uint8), "low": low, "high": high}
        return message


def unpack_anchors(message: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> AnchorSet:
    """What a client makes of the tensors that :class:`ClassAnchors` sent."""
    inputs = message["inputs"].to(device)
    if inputs.dtype == torch.uint8:
        low, high = message["low"].to(device), message["high"].to(device)
        inputs = low + (high - low) * inputs.float() / _LEVELS
    targets, confidence = message["targets"].to(device), message["confidence"].to(device)
    return AnchorSet(inputs.to(dtype), targets, confidence, float(message["quality"]))


def _rows(inputs: Any, count: int, device: torch.device) -> Any:
    """The first example of a batch's inputs, repeated."""
    if isinstance(inputs, Mapping):
        return {name: _rows(value, count, device) for name, value in inputs.items()}
    return inputs[:1].to(device).expand(count, *inputs.shape[1:]).contiguous()
