"""A LLaVA-like model as an ordinary LightningModule: nothing in it knows of clients or tasks."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.metrics.answers import score_answers
from lightning_fcl.mllm.collate import InstructionCollator
from lightning_fcl.mllm.loading import load_model, no_files
from lightning_fcl.mllm.lora import LoRA, add_lora, thaw_projector
from lightning_fcl.mllm.processor import load_processor

_NO_INPUTS = ("labels", "prompts", "answers", "metrics", "rows")


class MultimodalInstructionModule(L.LightningModule):
    """Answer-only training and greedy answering of an image-and-text model of transformers.

    Batches are lists of rows, as :class:`~lightning_fcl.data.InstructionDataset` gives them and ``collate_fn=as_list``
    leaves them; or what ``module.collator`` makes of such a list, if loading processes are to do that work. All weights
    are frozen but LoRA's, and the projector's if asked for.

    Logs ``train_loss`` (nats per answer token) and, in validation, ``val_acc``: the mean score of written answers, each
    by its row's ``metric``.

    Args:
        model: A model with ``generate`` and a loss for ``labels``, such as ``AutoModelForImageTextToText`` gives.
        processor: Its processor.
        lora: Adapters to train; ``None`` for none, if something else brings trainable weights.
        train_projector: Train the layers between vision tower and language model as well.
        lr: Learning rate of AdamW.
        weight_decay: Decoupled weight decay.
        warmup: Share of a job's steps in which the learning rate rises linearly; after it, it falls along a cosine.
        max_new_tokens: Most tokens of a written answer.
        max_length: Most tokens of an example; longer ones are refused.
        padding_side: On which side training batches are padded.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.

    Raises:
        MisconfigurationError: If the settings do not fit the model.

    Source: rank, learning rate, schedule and loss are those of the FCIT benchmark's code (github.com/Ghy0501/FCIT at
    9b10259).

    Deviation: the projector is frozen by default; there, it is trained and shared by all tasks.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        lora: LoRA | None = LoRA(),  # noqa: B008 (frozen)
        train_projector: bool = False,
        lr: float = 2e-4,
        weight_decay: float = 0.0,
        warmup: float = 0.03,
        max_new_tokens: int = 128,
        max_length: int | None = None,
        padding_side: Literal["left", "right"] = "right",
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= warmup < 1:
            raise MisconfigurationError(f"`warmup` must be a share of the steps in [0, 1), got {warmup}.")
        if max_new_tokens < 1:
            raise MisconfigurationError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}.")
        self.lr, self.weight_decay, self.warmup, self.max_new_tokens = lr, weight_decay, warmup, max_new_tokens
        self.collator = InstructionCollator(processor, max_length=max_length, padding_side=padding_side)
        model.requires_grad_(False)
        if gradient_checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        self.model = model if lora is None else add_lora(model, lora)
        if train_projector:
            thaw_projector(self.model)
        self._answers: list[tuple[str, str, str]] = []

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str = "main",
        local_files_only: bool = False,
        dtype: str = "float32",
        bits: Literal[4, 8] | None = None,
        **options: Any,
    ) -> Self:
        """Load model and processor.

        Args:
            path: Folder of the model, or its name on the Hugging Face Hub; ``TINY_LLAVA`` is the one that is shipped.
            revision: Version on the Hub.
            local_files_only: Use what is there, and ask nobody; the same as ``HF_HUB_OFFLINE=1``.
            dtype: Name of the dtype of the frozen weights; ``"auto"`` is that of the files.
            bits: Quantise the frozen weights to 4 or 8 bits, by bitsandbytes.
            **options: As in the class.

        Raises:
            MisconfigurationError: If files are missing, or settings do not fit the model.
            MissingExtraError: If a package is not installed (extras ``mllm`` and ``quantize``).
        """
        where = {"revision": revision, "local_files_only": local_files_only}
        try:
            processor = load_processor(path, **where)
        except (OSError, ValueError) as error:
            raise error if isinstance(error, MisconfigurationError) else no_files(path, error) from error
        return cls(load_model(path, dtype=dtype, bits=bits, **where), processor, **options)

    @property
    def processor(self) -> Any:
        """Image processor, tokenizer and chat template in one."""
        return self.collator.processor

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Make tensors of a list of rows."""
        return self._cast(self.collator(batch) if isinstance(batch, list) else batch)

    def _cast(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Pixels in the dtype of the frozen weights."""
        dtype = self.model.dtype
        return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}

    @override
    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Logits, shape ``(B, L, vocabulary)``."""
        logits: Tensor = self.model(**model_inputs(batch)).logits
        return logits

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the answers' tokens, in nats."""
        loss: Tensor = self.model(**model_inputs(batch), labels=batch["labels"]).loss
        self.log("train_loss", loss, batch_size=len(batch["labels"]))
        return loss

    @override
    def on_validation_epoch_start(self) -> None:
        """Forget the answers of the last set."""
        super().on_validation_epoch_start()
        self._answers.clear()

    @override
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Write an answer to each question."""
        self._answers += zip(batch["metrics"], self.predict_step(batch, batch_idx), batch["answers"], strict=True)

    @override
    def on_validation_epoch_end(self) -> None:
        """Log the mean score over the whole set, since a score of captions is none of single ones."""
        self.log("val_acc", self.score(), prog_bar=True, batch_size=1)
        super().on_validation_epoch_end()

    @override
    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> list[str]:
        """The model's answers, greedily."""
        return self.answer(batch["rows"])

    def score(self) -> float:
        """Mean score of the answers written since the last validation began, each by its row's metric."""
        total = 0.0
        for metric in {metric for metric, _, _ in self._answers}:
            chosen = [(said, right) for kind, said, right in self._answers if kind == metric]
            said, right = zip(*chosen, strict=True)
            total += len(chosen) * score_answers(metric, said, right)
        return total / len(self._answers)

    @torch.no_grad()
    def answer(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Write an answer to the first question of each row, greedily.

        Args:
            rows: As :class:`~lightning_fcl.data.InstructionDataset` gives them; their answers are not looked at.
        """
        prompts = self._cast(self.collator.prompts(rows))
        return self.write({name: value.to(self.device) for name, value in prompts.items()})

    def write(self, prompts: Mapping[str, Tensor]) -> list[str]:
        """Continue prompts that are padded on the left."""
        tokenizer = self.processor.tokenizer
        ids = self.model.generate(
            **prompts,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            synced_gpus=_is_sharded(self.model),
        )
        new = ids[:, prompts["input_ids"].shape[1] :]
        return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]

    @override
    def configure_optimizers(self) -> Any:
        """AdamW with linear warm-up and cosine decay over the job."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)
        steps = float(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, steps, self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def instruction_module(path: str | Path, **options: Any) -> MultimodalInstructionModule:
    """:meth:`MultimodalInstructionModule.from_pretrained` as a function, which a YAML file can name.

    Args:
        path: Folder of the model, or its name on the Hugging Face Hub.
        **options: As there.
    """
    return MultimodalInstructionModule.from_pretrained(path, **options)


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What of a batch the model reads."""
    return {name: value for name, value in batch.items() if name not in _NO_INPUTS}


def warm_cosine(step: int, steps: float, warmup: float) -> float:
    """Factor of the learning rate: linear up to 1, then along a cosine to 0.

    Example:
        >>> [round(warm_cosine(step, 10, 0.2), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if not math.isfinite(steps):
        return 1.0
    first = math.ceil(warmup * steps)
    if step < first:
        return (step + 1) / first
    return (1 + math.cos(math.pi * min(1.0, (step - first) / max(1, steps - first)))) / 2


def _is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights only, so that all must take the same number of steps."""
    return any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())
