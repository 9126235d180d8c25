"""DeepSpeed ZeRO: one engine for all clients of a run, switched by its master weights, working copies and state."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fcl._imports import optional_import
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.strategy import StrategyEngine, rebuild_parameters
from lightning_fcl.federated.layout import named_tensors


class DeepSpeedEngine(StrategyEngine):
    """All ranks train one client at a time under ZeRO 0 to 3; one optimiser, clipping by DeepSpeed's own option.

    DeepSpeed starts with the first job's optimiser and keeps a twin of it, whose parameters are DeepSpeed's flat
    partitions. The user's own optimiser of each job stays as the face that schedulers and callbacks see: its learning
    rates and other settings are copied to the twin before every step.

    Raises:
        MisconfigurationError: If clipping by value is asked for, if the strategy's configuration clips to another norm,
            if there is not exactly one optimiser, or if the module overrides ``backward``.
    """

    clips_gradients = True
    _optimizer: Any = None  # DeepSpeed's wrapper around the twin; None before the first job
    _has_gradients = False

    @staticmethod
    @override
    def accepts(strategy: object) -> bool:
        return isinstance(strategy, DeepSpeedStrategy)

    @override
    def _wrap_by(self, strategy: Any) -> nn.Module:
        if is_overridden("backward", self.module):
            raise MisconfigurationError(
                "`backward` must not be overridden under DeepSpeed, which runs the backward pass itself. "
                "Use strategy='ddp' for this module."
            )
        _set_clipping(strategy.config, self.gradient_clip_val, self.gradient_clip_algorithm)
        return self.module

    @override
    def teardown(self) -> None:
        if self._optimizer is None:
            return
        dtypes = self._dtypes
        values = {n: self._gather(p).detach().to(dtypes[n], copy=True) for n, p in self.module.named_parameters()}
        self.root.destroy()  # type: ignore[operator]
        self.root, self._optimizer = self.module, None
        rebuild_parameters(self.module, values)
        for name, buffer in self.module.named_buffers():
            buffer.data = buffer.to(dtypes[name])

    # -- once a job -----------------------------------------------------------------------------------------------

    @override
    def attach_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        if len(optimizers) != 1:
            raise MisconfigurationError(
                f"`configure_optimizers` must return one optimiser under DeepSpeed, got {len(optimizers)}. "
                "Use parameter groups, or strategy='ddp'."
            )
        (self._face,) = optimizers
        if self._optimizer is None:
            self._start(_twin(self._face))
        self._reset()
        return optimizers

    def _start(self, twin: Optimizer) -> None:
        strategy: Any = self.fabric.strategy
        shell = _Shell(self.module)
        self._dtypes = {name: tensor.dtype for name, tensor in named_tensors(self.module).items()}
        self.root, (self._optimizer,), _ = strategy.setup_module_and_optimizers(shell, [twin])
        for tensor in filter(_is_partitioned, self.module.parameters(recurse=False)):
            _deepspeed().zero.register_external_parameter(shell, tensor)
        self._twin: Optimizer = getattr(self._optimizer, "optimizer", self._optimizer)
        self._fresh_state = _copied(self._twin.state)  # not empty where the class fills it when it is built
        self._fresh_groups = [{k: v for k, v in g.items() if k != "params"} for g in self._twin.param_groups]
        self._fresh_scaler = copy.deepcopy(getattr(self._optimizer, "loss_scaler", None))

    def _reset(self) -> None:
        """Leave nothing of the job before: moments, counters, settings, loss scale."""
        self._twin.state = defaultdict(dict, _copied(self._fresh_state))
        for group, fresh in zip(self._twin.param_groups, self._fresh_groups, strict=True):
            for name in group.keys() - fresh.keys() - {"params"}:
                del group[name]
            group.update(fresh)
        if self._fresh_scaler is not None:
            self._optimizer.loss_scaler = copy.deepcopy(self._fresh_scaler)

    @override
    def _abandon_step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()
            for buffers in ("averaged_gradients", "all_grad_tensors"):
                getattr(self._optimizer, buffers, {}).clear()
        self._has_gradients = False

    # -- weights --------------------------------------------------------------------------------------------------

    @override
    def _gather(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) or self._optimizer is None:
            return super()._gather(tensor)
        if tensor.dtype == torch.float32 and not _is_partitioned(tensor):
            return tensor  # ZeRO-1 and ZeRO-2 gather it after every step
        master = _deepspeed().utils.safe_get_full_fp32_param(tensor) if tensor.requires_grad else None
        if isinstance(master, Tensor):
            return master
        with _gathered(tensor, source=None):
            return tensor.detach().clone()

    @override
    def _scatter(self, tensor: Tensor, value: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and self._optimizer is not None:
            value = value.to(tensor.device)
            if _is_partitioned(tensor):
                _deepspeed().utils.safe_set_local_fp32_param(tensor, _own_part(tensor, value.float()))
            else:
                _deepspeed().utils.safe_set_full_fp32_param(tensor, value.float())
        with _gathered(tensor, source=0):
            tensor.copy_(value)

    # -- steps ----------------------------------------------------------------------------------------------------

    @override
    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        if self._optimizer is not None:
            return self.root(method, *args)
        half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(self.precision.precision))
        with torch.autocast(self.fabric.device.type, dtype=half, enabled=half is not None):
            return method(*args)  # inputs are cast already; DeepSpeed casts the weights only when it starts

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.root.backward(loss, *args, **kwargs)  # type: ignore[operator]
        self._has_gradients = True

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], after_closure: Callable[[], None]
    ) -> Any:
        result = closure()
        after_closure()
        if self._has_gradients:
            for group, face in zip(self._twin.param_groups, self._face.param_groups, strict=True):
                group.update({name: value for name, value in face.items() if name != "params"})
            self.root.step()  # type: ignore[operator]
            self._has_gradients = False
            self._inside_step = False
            self._face.step()  # moves nothing, as DeepSpeed has taken the gradients; schedulers count the call
        return result

    @override
    def accumulating(self, active: bool) -> AbstractContextManager[Any]:
        return self._inside_accumulation() if active else nullcontext()

    @contextmanager
    def _inside_accumulation(self) -> Iterator[None]:
        root: Any = self.root
        root.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            root.set_gradient_accumulation_boundary(True)

    @override
    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        raise MisconfigurationError(
            "`clip_gradients` must not be called under DeepSpeed, which clips by itself. "
            "Pass `gradient_clip_val` to FederatedTrainer."
        )

    @override
    @torch.no_grad()
    def add_to_gradients(self, terms: Mapping[str, Tensor]) -> None:
        utils, own = _deepspeed().utils, dict(self.module.named_parameters())
        scale = getattr(self._optimizer, "loss_scale", 1.0)
        for name, term in terms.items():
            tensor, term = own[name], (term * scale).float()
            if _is_partitioned(tensor):
                utils.safe_set_local_grad(tensor, utils.safe_get_local_grad(tensor) + _own_part(tensor, term))
            elif (grad := utils.safe_get_full_grad(tensor)) is not None:
                utils.safe_set_full_grad(tensor, grad + term)


class _Shell(nn.Module):
    """What DeepSpeed wraps: runs any method of the module.

    A step that called the module inside the module's own call would, under ZeRO-3, lose the module's direct parameters
    when the inner call ends. They are registered with the shell too, which holds them for the whole step.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, method: Callable[..., Any], *args: Any) -> Any:
        return method(*args)


def _deepspeed() -> Any:
    return optional_import("deepspeed", extra="deepspeed")


def _is_partitioned(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has cut the parameter over the ranks."""
    return hasattr(tensor, "ds_id")


def _gathered(tensor: Tensor, source: int | None) -> AbstractContextManager[Any]:
    """The full parameter, to read or to take what rank ``source`` writes; without ZeRO-3 it is always there."""
    if not _is_partitioned(tensor):
        return nullcontext()
    gathered = _deepspeed().zero.GatheredParameters
    return gathered([tensor], modifier_rank=source)  # type: ignore[no-any-return]


def _own_part(tensor: Any, value: Tensor) -> Tensor:
    """This rank's part of a full ``value``: ZeRO-3 pads the flat tensor to equal parts.

    DeepSpeed's ``safe_set_full_*`` fail on a ZeRO-3 parameter whose size is no multiple of the number of ranks, so the
    ``local`` functions are used, which also send nothing.
    """
    size, rank = tensor.ds_tensor.numel(), dist.get_rank(tensor.ds_process_group)
    world = dist.get_world_size(tensor.ds_process_group)
    return nn.functional.pad(value.flatten(), (0, size * world - value.numel()))[rank * size : (rank + 1) * size]


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimiser of the same class and settings with groups and state of its own, on the same parameters."""
    twin = copy.copy(optimizer)  # torch copies defaults, groups and state only
    missing = {name: value for name, value in vars(optimizer).items() if name not in vars(twin)}
    missing.pop("step", None)  # a scheduler's counter, bound to the original
    vars(twin).update(missing)
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    return twin


def _copied(state: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
    """An optimiser's state with copied values; its keys are the parameters themselves."""
    return {parameter: copy.deepcopy(values) for parameter, values in state.items()}


def _set_clipping(config: dict[str, Any], value: float | None, algorithm: str) -> None:
    """Put the user's clipping into DeepSpeed's configuration, which clips to norm 1 when it says nothing."""
    if value and algorithm == "value":
        raise MisconfigurationError(
            "`gradient_clip_algorithm` must be 'norm' under DeepSpeed, which cannot clip by value, got 'value'."
        )
    given = config.get("gradient_clipping", 0.0)
    if value is not None and given not in (0.0, value):
        raise MisconfigurationError(
            f"`gradient_clip_val` must agree with DeepSpeed's `gradient_clipping`, got {value} and {given}. Give one."
        )
    config["gradient_clipping"] = float(value if value is not None else given)
