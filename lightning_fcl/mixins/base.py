"""The base of all loss mixins: it catches logits and features of a plain classifier and adds terms to its loss."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lightning_fcl._heads import find_head, modes_kept
from lightning_fcl.callbacks.base import task_is_over
from lightning_fcl.callbacks.gradients import check_gradient_access
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.types import Params

_LABELS = ("labels", "label")
_CHECKPOINT_KEY = "lightning_fcl_task_anchor"


@dataclass(frozen=True)
class StepOutputs:
    """What the head of a classifier took and gave in one training step.

    Args:
        logits: Output of the head, shape ``[B, C]``.
        features: Input of the head, shape ``[B, d]``.
    """

    logits: Tensor
    features: Tensor


class LossTermsMixin(L.LightningModule):
    """Adds terms of logits and features to the loss of an unmodified ``training_step``.

    A method derives from it, and the user puts the method left of the own class: ``class Net(LwF, LitNet)``. Several
    compose: each extends :meth:`loss_terms` by ``{**super().loss_terms(outputs, batch), "name": term}``. Their settings
    are keyword arguments of the module with the method's prefix: ``Net(hidden=8, lwf_strength=1.0)``.

    Each term is logged as ``loss/<name>``.

    Attributes:
        feature_module: Dotted name of the head, whose input is the features and whose output the logits; ``None`` for
            the last ``nn.Linear`` of the module.
        uses_task_anchor: Set to ``True`` on a subclass to find the previous task's final weights in
            :meth:`task_anchor`.
        uses_round_anchor: Set to ``True`` on a subclass to find the weights at the start of local training in
            :meth:`round_anchor`.

    Raises:
        MisconfigurationError: When a class is defined whose own ``training_step`` would hide the mixins'; before the
            first batch, with manual optimisation or without a head, or if older weights are to be evaluated without a
            ``forward``, or where no rank holds whole ones (FSDP 2, DeepSpeed).
    """

    feature_module: str | None = None
    uses_task_anchor: bool = False
    uses_round_anchor: bool = False

    _own_task_anchor: dict[str, Tensor] | None = None
    _round_anchor: dict[str, Tensor] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_reached(cls)

    # -- what a method overrides ---------------------------------------------------------------------------------------

    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        """Terms to add to the loss.

        Args:
            outputs: Logits and features of this step, with their graph.
            batch: As ``training_step`` got it.

        Returns:
            Scalars by name, already multiplied by their strength.
        """
        return {}

    def own_loss_weight(self) -> float:
        """Factor of the module's own loss; override it as ``weight * super().own_loss_weight()``."""
        return 1.0

    # -- what a user overrides for unusual batches ---------------------------------------------------------------------

    def inputs_of(self, batch: Any) -> Any:
        """What ``forward`` takes: the first item of a tuple, or a dictionary without its labels (as keywords)."""
        if isinstance(batch, Mapping):
            return {name: value for name, value in batch.items() if name not in _LABELS}
        return batch[0]

    def targets_of(self, batch: Any) -> Tensor:
        """Class labels, shape ``[B]``: the second item of a tuple, or ``"labels"`` (``"label"``) of a dictionary."""
        if not isinstance(batch, Mapping):
            targets = batch[1]
        elif (name := next((name for name in _LABELS if name in batch), None)) is not None:
            targets = batch[name]
        else:
            raise MisconfigurationError(
                f"`batch` must hold its labels under one of {_LABELS}, got the keys {sorted(batch)}. Override "
                "`targets_of`."
            )
        assert isinstance(targets, Tensor)
        return targets

    # -- what a method may ask -----------------------------------------------------------------------------------------

    def find_head(self) -> nn.Module:
        """The module whose input is the features and whose output the logits.

        Raises:
            MisconfigurationError: If there is none.
        """
        return find_head(self, self.feature_module)[1]

    def task_anchor(self) -> dict[str, Tensor] | None:
        """Parameters and float buffers at the end of the previous task, by name; ``None`` in the first task.

        In a federation the global weights; in a stock ``Trainer`` those at the end of the previous ``fit``.
        """
        if isinstance(self.trainer, L.Trainer):
            return self._own_task_anchor
        anchor: dict[str, Tensor] | None = self.trainer.task_anchor
        return anchor

    def round_anchor(self) -> dict[str, Tensor]:
        """Parameters and float buffers at the start of local training, by name: what the server sent."""
        if self._round_anchor is None:
            raise MisconfigurationError("`round_anchor` is kept only where `uses_round_anchor` is True.")
        return self._round_anchor

    @torch.no_grad()
    def frozen_outputs(self, weights: Params, batch: Any) -> StepOutputs:
        """Logits and features of this module with other weights: in eval mode, without gradients.

        BatchNorm statistics stay as they are, and no random number is drawn.

        Args:
            weights: Parameters and buffers by name; what is missing is taken from the module as it stands.
            batch: As ``training_step`` got it.

        Returns:
            Outputs without a graph.
        """
        inputs = self.inputs_of(batch)
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
        with modes_kept(self, training=False), self._catching() as caught:
            functional_call(self, dict(weights), args, dict(kwargs))
        return _only(caught, "forward")

    # -- Lightning's hooks ---------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step``, with its loss weighted and the terms added."""
        inner = super().training_step
        batch = kwargs["batch"] if "batch" in kwargs else args[0]
        if len(args) > 1 and not is_param_in_hook_signature(inner, "batch_idx", min_args=2):
            args = args[:1]
        with self._catching() as caught:
            result = inner(*args, **kwargs)
        if result is None:
            return None
        outputs = _only(caught, "training_step")
        terms = self.loss_terms(outputs, batch)
        for name, term in terms.items():
            self.log(f"loss/{name}", term.detach(), batch_size=len(outputs.logits))  # batches may be of any form
        loss, weight = result["loss"] if isinstance(result, Mapping) else result, self.own_loss_weight()
        loss = sum(terms.values(), loss if weight == 1 else weight * loss)
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    @override
    def on_train_start(self) -> None:
        if not self.automatic_optimization:
            raise MisconfigurationError(
                f"{type(self).__name__} must use automatic optimization: with manual optimization the terms would come "
                "too late. Add `self.loss_terms(...)` in a `training_step` of your own instead."
            )
        self.find_head()
        if self.uses_task_anchor or self.uses_round_anchor:
            _check_teachable(self)
        if self.uses_round_anchor:
            self._round_anchor = current_weights(self)
        if self._own_task_anchor is not None:
            self._own_task_anchor = {name: value.to(self.device) for name, value in self._own_task_anchor.items()}
        self._step_at_start = self.trainer.global_step
        super().on_train_start()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._round_anchor = None
        if self.uses_task_anchor and task_is_over(self.trainer, self._step_at_start):
            self._own_task_anchor = current_weights(self)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._own_task_anchor is not None:
            checkpoint[_CHECKPOINT_KEY] = self._own_task_anchor

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._own_task_anchor = checkpoint.get(_CHECKPOINT_KEY)

    @contextmanager
    def _catching(self) -> Iterator[list[StepOutputs]]:
        caught: list[StepOutputs] = []

        def catch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            caught.append(StepOutputs(output, inputs[0]))

        handle = self.find_head().register_forward_hook(catch)
        try:
            yield caught
        finally:
            handle.remove()


def _only(caught: list[StepOutputs], where: str) -> StepOutputs:
    if len(caught) != 1:
        raise MisconfigurationError(
            f"the head must run once in `{where}`, but it ran {len(caught)} times. Name another module in the class "
            "attribute `feature_module`."
        )
    return caught[0]


def current_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of what a forward pass needs and training changes: trainable parameters and float buffers."""
    params = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    return params | {name: b.detach().clone() for name, b in module.named_buffers() if b.is_floating_point()}


def _check_reached(kind: type) -> None:
    """Refuse a class in which a ``training_step`` on the left hides that of the mixins."""
    for parent in kind.__mro__[: kind.__mro__.index(LossTermsMixin)]:
        step = vars(parent).get("training_step")
        if inspect.isfunction(step) and "training_step" not in inspect.unwrap(step).__code__.co_names:
            raise MisconfigurationError(
                f"`{kind.__name__}` must reach the `training_step` of its mixins, but that of `{parent.__name__}` is "
                "found first and does not call `super().training_step`. Put the mixins on the left of your own module: "
                "`class Net(Method, LitNet)`."
            )


def _check_teachable(module: L.LightningModule) -> None:
    """Whether older weights can be evaluated in ``module``."""
    name = type(module).__name__
    if getattr(module.forward, "__func__", None) is L.LightningModule.forward:
        raise MisconfigurationError(
            f"{name} must have a `forward`, by which older weights are asked: from `inputs_of(batch)` to the logits."
        )
    check_gradient_access(module.trainer, name)
    if getattr(module.trainer, "sharded", False):
        raise MisconfigurationError(
            f"{name} evaluates older weights in the same module, which must be whole on every rank, but this strategy "
            "keeps them in shards. Use DDP, or parallel='clients'."
        )
