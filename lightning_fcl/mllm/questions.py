"""Tell tasks apart by their questions, with nothing but the language model's own word vectors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class QuestionEmbeddings:
    """Mean word vector of a question and its format hint, for ``SubspaceRoutingMixin(routing_encoder=...)``.

    Chat template, image and answer do not count. What all vectors of the vocabulary share is taken away first, their
    mean and their first principal component, and each is scaled to length 1, so that long ones do not drown the rest.
    On the drawn tasks, tokens of one task then have cosines above those of any two tasks by a wide margin, with the
    paper's threshold of 0.9 in between.

    Args:
        embedding: Frozen word vectors, such as ``model.get_input_embeddings()`` gives, whole.
        tokenizer: Their tokenizer.

    Source: Mu & Viswanath, "All-but-the-Top: Simple and Effective Postprocessing for Word Representations", ICLR 2018,
    algorithm 1 (https://arxiv.org/abs/1702.01417).

    Deviation: one component, where they take d / 100 or so; and vectors of length 1.
    """

    def __init__(self, embedding: nn.Embedding, tokenizer: Any) -> None:
        self.weight = embedding.weight.detach()  # as it is now: ranks may cut the parameter up later
        self.tokenizer = tokenizer
        self._shared: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, module: Any) -> "QuestionEmbeddings":
        """Those of a :class:`~lightning_fcl.mllm.MultimodalInstructionModule`."""
        return cls(module.model.get_input_embeddings(), module.processor.tokenizer)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """Features of ``batch["prompts"]``, shape ``(B, d)``, float32; zero for an empty question."""
        return torch.stack([self._mean(ids) for ids in self._ids(batch["prompts"])])

    def _ids(self, questions: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(list(questions), add_special_tokens=False)["input_ids"]
        return ids

    def _mean(self, ids: Sequence[int]) -> Tensor:
        weight = self.weight
        mean, top = self._common(weight)
        vectors = weight[torch.tensor(ids, dtype=torch.long, device=weight.device)].float() - mean
        vectors = nn.functional.normalize(vectors - (vectors @ top)[:, None] * top, dim=1)
        return vectors.sum(dim=0) / max(1, len(ids))

    def _common(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and first principal component of all vectors; found once, since they are frozen."""
        if self._shared is None:
            mean = weight.float().mean(dim=0)
            centred = weight.float() - mean
            self._shared = mean, torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
        mean, top = (tensor.to(weight.device) for tensor in self._shared)
        return mean, top
