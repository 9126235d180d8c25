"""DISCO's subspace selective activation: at evaluation every subspace speaks as much as it resembles the input."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.identity_token import ThresholdProposal, identity_token, propose_threshold
from lightning_fcl.functional.subspace_lora import ACTIVATIONS, Activation, activation_factors
from lightning_fcl.models.prompt_encoders import ImageMean, PromptEmbeddings
from lightning_fcl.models.subspace_lora import SubspaceLinear, subspace_layers
from lightning_fcl.types import Params

Encoder = Callable[[Any], Tensor]
_CHOICES = {
    "routing_activation": ACTIVATIONS,
    "routing_source": ("text", "image", "both"),
}


class SubspaceRoutingMixin(L.LightningModule):
    r"""Evaluates with a bank of LoRA subspaces, each scaled per sample by how well its token matches the input.

    Stands left of your class, ``class Net(SubspaceRoutingMixin, LitNet)``, over a model with
    :func:`~lightning_fcl.models.add_subspaces` layers. Training sees the one subspace that a client trains;
    validation, test and prediction steps see the whole bank, once a router (``aggregator=SubspaceRouter(...)``) or
    :func:`~lightning_fcl.models.load_subspaces` has installed one. Elsewhere, around your own ``generate``:

    .. code-block:: python

        with module.routed(batch):
            module.model.generate(...)

    The factors are computed once per batch and logged as ``slot/<i>``, their mean over a validation set.

    Args:
        routing_activation: ``"softmax"`` (the paper's), ``"argmax"``, ``"cosine"`` or ``"concatenation"``.
        routing_temperature: The softmax's, .05 in the paper.
        routing_source: What is compared: the instruction's ``"text"`` (the paper's), the ``"image"``, or ``"both"``
            (the mean of the two cosines).
        routing_encoder: Frozen text encoder, from a batch to features of shape ``[B, d]``; by default the language
            model's own embeddings (:class:`~lightning_fcl.models.PromptEmbeddings`). A ``torch.nn.Module`` becomes a
            part of this module.
        routing_image_encoder: The same for images; by default the mean over the model's own vision tower.
        *args: For your class, and so are further keyword arguments.

    Raises:
        MisconfigurationError: If an argument has another value.

    Source: Guo et al., "Federated Continual Instruction Tuning", ICCV 2025, subspace selective activation
    (https://arxiv.org/abs/2503.12897).

    Deviation: as :func:`~lightning_fcl.functional.activation_factors`. How the paper joins text and image is not said;
    here their cosines are averaged.
    """

    def __init__(
        self,
        *args: Any,
        routing_activation: Activation = "softmax",
        routing_temperature: float = 0.05,
        routing_source: Literal["text", "image", "both"] = "text",
        routing_encoder: Encoder | None = None,
        routing_image_encoder: Encoder | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (("routing_activation", routing_activation), ("routing_source", routing_source)):
            if value not in _CHOICES[name]:
                raise MisconfigurationError(f"`{name}` must be one of {', '.join(_CHOICES[name])}, got {value!r}.")
        if not routing_temperature > 0:
            raise MisconfigurationError(f"`routing_temperature` must be positive, got {routing_temperature}.")
        super().__init__(*args, **kwargs)
        self.routing_activation = routing_activation
        self.routing_temperature = routing_temperature
        self.routing_source = routing_source
        self.routing_encoder = _frozen(routing_encoder)
        self.routing_image_encoder = _frozen(routing_image_encoder)
        self.subspace_tokens: Tensor | None = None
        self.num_subspaces = 0
        self.subspace_tasks: tuple[int, ...] = ()
        self._factors: Tensor | None = None
        self._embeddings: PromptEmbeddings | None = None
        self._image_mean: ImageMean | None = None

    @property
    def routing_features(self) -> str:
        """What is compared, in words: tokens of modules that differ in it have nothing to do with each other."""
        encoder = self.routing_encoder
        return f"{self.routing_source} by {'its own features' if encoder is None else type(encoder).__name__}"

    # -- what the inputs ask for --------------------------------------------------------------------------------------

    def identity_features(self, batch: Any) -> Tensor:
        """Features that tell tasks apart; override it for batches of your own.

        Args:
            batch: A training or evaluation batch. Answers must not count: an evaluation does not know them.

        Returns:
            Shape ``[B, d]``, without gradient.
        """
        with torch.no_grad():
            text = self._text_features(batch) if self.routing_source != "image" else None
            image = self._image_features(batch) if self.routing_source != "text" else None
        if text is None or image is None:
            found = image if text is None else text
            assert found is not None
            return found
        return torch.cat([F.normalize(text.float(), dim=1), F.normalize(image.float(), dim=1)], dim=1)

    def _text_features(self, batch: Any) -> Tensor:
        if self.routing_encoder is not None:
            return self.routing_encoder(batch)
        self._embeddings = self._embeddings or PromptEmbeddings.of(self)
        return self._embeddings(batch)

    def _image_features(self, batch: Any) -> Tensor:
        if self.routing_image_encoder is not None:
            return self.routing_image_encoder(batch)
        self._image_mean = self._image_mean or ImageMean.of(self)
        return self._image_mean(batch)

    def propose_threshold(self, loaders: Sequence[Iterable[Any]], parts: int = 4) -> ThresholdProposal:
        """A threshold for this module's features, from held-out prompts of some tasks.

        Args:
            loaders: Batches of each task, e.g. ``[stream.eval_loader(0), stream.eval_loader(1)]``.
            parts: Into how many parts, each with a token of its own, a task is cut.

        Returns:
            As :func:`~lightning_fcl.functional.propose_threshold`.
        """
        tokens: list[Tensor] = []
        tasks: list[int] = []
        for task, loader in enumerate(loaders):
            batches = (self.on_before_batch_transfer(batch, 0) for batch in loader)
            features = torch.cat([self.identity_features(batch) for batch in batches])
            tokens += [identity_token(part) for part in features.tensor_split(parts) if len(part)]
            tasks += [task] * (len(tokens) - len(tasks))
        return propose_threshold(torch.stack(tokens), tasks)

    # -- the bank -----------------------------------------------------------------------------------------------------

    def install_subspaces(
        self, slots: Sequence[Params], tokens: Tensor | None = None, *, tasks: Sequence[int] = ()
    ) -> None:
        """Replace the bank of all subspace layers.

        Args:
            slots: For each subspace its ``<layer>.lora_A`` and ``<layer>.lora_B`` by name; empty to remove the bank.
            tokens: Identity tokens, shape ``[T, d]``; ``None`` lets all subspaces speak at full strength.
            tasks: Task of each subspace, where tasks are told and not found.

        Raises:
            ValueError: If tokens and slots do not match, or a tensor has the wrong shape.
        """
        if tokens is not None and len(tokens) != len(slots):
            raise ValueError(f"`tokens` must hold one row per subspace ({len(slots)}), got {len(tokens)}.")
        for name, layer in subspace_layers(self).items():
            layer.set_bank([s[f"{name}.lora_A"] for s in slots], [s[f"{name}.lora_B"] for s in slots])
        self.subspace_tokens = tokens
        self.num_subspaces = len(slots)
        self.subspace_tasks = tuple(tasks)

    def factors(self, batch: Any) -> Tensor:
        """How strongly each subspace speaks for each sample of ``batch``, shape ``[B, T]``."""
        if self.subspace_tokens is None:
            return torch.ones(1, self.num_subspaces, device=self.device)
        features = self.identity_features(batch)
        tokens = self.subspace_tokens.to(features.device)
        return activation_factors(features, tokens, self.routing_temperature, self.routing_activation)

    @contextmanager
    def routed(self, batch: Any) -> Iterator[Tensor | None]:
        """Within it the subspaces speak as ``batch`` asks for; gives the factors, or ``None`` without a bank."""
        self._activate(batch)
        try:
            yield self._factors
        finally:
            self._deactivate()

    def _activate(self, batch: Any) -> None:
        if self.num_subspaces:
            self._factors = self.factors(batch)
            for layer in self._layers():
                layer.activate(self._factors)

    def _deactivate(self) -> None:
        if self._factors is not None:
            self._factors = None
            for layer in self._layers():
                layer.activate(None, active=True)

    def _layers(self) -> list[SubspaceLinear]:
        return list(subspace_layers(self).values())

    # -- when ---------------------------------------------------------------------------------------------------------

    @override
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().on_validation_batch_start(batch, batch_idx, dataloader_idx)
        self._activate(batch)

    @override
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self._factors is not None and self.subspace_tokens is not None:
            for slot, mean in enumerate(self._factors.mean(0)):
                self.log(f"slot/{slot}", mean, batch_size=len(self._factors))
        self._deactivate()
        super().on_validation_batch_end(outputs, batch, batch_idx, dataloader_idx)

    @override
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().on_test_batch_start(batch, batch_idx, dataloader_idx)
        self._activate(batch)

    @override
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._deactivate()
        super().on_test_batch_end(outputs, batch, batch_idx, dataloader_idx)

    @override
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().on_predict_batch_start(batch, batch_idx, dataloader_idx)
        self._activate(batch)

    @override
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._deactivate()
        super().on_predict_batch_end(outputs, batch, batch_idx, dataloader_idx)


def _frozen(encoder: Encoder | None) -> Encoder | None:
    return encoder.requires_grad_(False).eval() if isinstance(encoder, nn.Module) else encoder
