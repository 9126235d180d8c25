"""DeepSpeed ZeRO on CPU ranks, for tests only."""

import os
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fcl._imports import optional_import


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy for ``Fabric(accelerator="cpu")``: ZeRO stages 0 to 3 over gloo.

    It lifts Lightning's refusal of CPUs and leaves everything else alone, but for two defaults of DeepSpeed that a test
    must not meet unasked: gradients are clipped only if ``gradient_clipping`` says so (DeepSpeed 0.19 clips to norm 1
    when its configuration is silent), and no extension is compiled when the process group starts.

    Args:
        gradient_clipping: Largest total norm of the gradients; 0 switches clipping off.
        kwargs: Arguments of :class:`lightning.fabric.strategies.DeepSpeedStrategy`, such as ``stage=3``.

    Raises:
        MissingExtraError: If DeepSpeed is not installed.
        RuntimeError: If DeepSpeed was imported before and has chosen another accelerator than the CPU.
    """

    def __init__(self, *, gradient_clipping: float = 0.0, **kwargs: Any) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read once, when DeepSpeed is imported
        chosen = optional_import("deepspeed.accelerator", extra="deepspeed").get_accelerator().device_name()
        if chosen != "cpu":
            raise RuntimeError(
                f"DeepSpeed must run on the CPU here, but it has chosen {chosen!r}. "
                "Set DS_ACCELERATOR=cpu before the first import of deepspeed."
            )
        super().__init__(**kwargs)
        assert isinstance(self.config, dict)
        self.config.setdefault("gradient_clipping", gradient_clipping)

    @override
    def setup_environment(self) -> None:
        super(DDPStrategy, self).setup_environment()  # past the parent, whose own part is the refusal of CPUs
        self._setup_distributed()

    @override
    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        # The shared-memory reducer serves inference only, and would be compiled on machines that have a compiler.
        optional_import("deepspeed.ops", extra="deepspeed").__compatible_ops__["deepspeed_shm_comm"] = False
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    @override
    def _initialize_engine(
        self, model: Module, optimizer: Optimizer | None = None, scheduler: Any = None
    ) -> tuple[Any, Optimizer, Any]:
        engine, wrapped, _, wrapped_scheduler = optional_import("deepspeed", extra="deepspeed").initialize(
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=scheduler,
            dist_init_required=False,
        )
        return engine, wrapped, wrapped_scheduler
