"""The way into a module behind its encoders: what embeddings a batch has, and what the module says of embeddings."""

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_fcl.functional.embedding_replay import Rehearsal, soft_cross_entropy
from lightning_fcl.mixins.base import LossTermsMixin, StepOutputs


class EmbeddingForwardMixin(LossTermsMixin):
    """Lets :class:`~lightning_fcl.EmbeddingReplay` rehearse embeddings: ``class Net(EmbeddingForwardMixin, LitNet)``.

    As it is, the embeddings are a plain classifier's features, the input of its head (see ``feature_module``), and only
    the head is trained by the rehearsal. A module of several modalities overrides the two methods below: in a
    multimodal language model the embeddings are the projected visual tokens and the text's token embeddings, and the
    way in is ``inputs_embeds``. Whatever stands before the embeddings gets no gradient from the rehearsal.
    """

    rehearsal: Rehearsal | None = None
    """Set by the callback for the length of one batch."""

    def embeddings_of(self, batch: Any) -> tuple[Tensor, ...]:
        """Embeddings of a batch, one tensor per modality: visual and text, or the features alone.

        Args:
            batch: As ``training_step`` gets it.

        Returns:
            Shapes ``(B, *positions, d)``, with the same positions in every batch and the same ``d`` in each modality.
        """
        return (self.frozen_outputs({}, batch).features,)

    def forward_embeddings(self, *embeddings: Tensor) -> Tensor:
        """Logits of embeddings, shape ``(B, C)``, by what comes after them alone.

        Args:
            *embeddings: What :meth:`embeddings_of` returns.
        """
        logits = self.find_head()(*embeddings)
        assert isinstance(logits, Tensor)
        return logits

    @override
    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        terms = super().loss_terms(outputs, batch)
        if self.rehearsal is None:
            return terms
        embeddings, targets, strength = self.rehearsal
        return {**terms, "replay": strength * soft_cross_entropy(self.forward_embeddings(*embeddings), targets)}
