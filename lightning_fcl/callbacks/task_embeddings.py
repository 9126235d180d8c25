"""What a client holds of a task's embeddings while a generator is fitted to them."""

import torch
from torch import Tensor


class TaskEmbeddings:
    """Means by event over all examples, and pooled embeddings of some of them.

    Token sequences are only summed up, so that memory grows with events times tokens and with examples times width,
    never with examples times tokens times width.

    Args:
        most: Examples to hold at most, drawn uniformly from all (reservoir sampling); ``None`` for all.
        rng: Draws them, on the CPU; with no more examples than ``most`` it is not touched.
    """

    def __init__(self, most: int | None, rng: torch.Generator) -> None:
        self._most = most
        self._rng = rng
        self._sums: dict[int, list[Tensor]] = {}
        self._counts: dict[int, int] = {}
        self._rows: list[tuple[Tensor, ...]] = []
        self._seen = 0

    def add(self, labels: Tensor, teacher: Tensor, embeddings: list[Tensor]) -> None:
        """Take in a batch.

        Args:
            labels: Class numbers, shape ``(B,)``, int64.
            teacher: The classifier's probabilities, shape ``(B, C)``.
            embeddings: One tensor per modality, shapes ``(B, *positions, d)``.
        """
        from lightning_fcl.models.embedding_generator import pooled  # late: models import mixins, and those callbacks

        for label in torch.unique(labels).tolist():
            own = labels == label
            sums = [one[own].sum(0, dtype=torch.float64) for one in (teacher, *embeddings)]
            old = self._sums.get(label)
            self._sums[label] = sums if old is None else [a + b for a, b in zip(old, sums, strict=True)]
            self._counts[label] = self._counts.get(label, 0) + int(own.sum())
        for row in zip(labels, teacher, *(pooled(one) for one in embeddings), strict=True):
            self._keep(row)

    def _keep(self, row: tuple[Tensor, ...]) -> None:
        self._seen += 1
        if self._most is None or self._seen <= self._most:
            self._rows.append(row)
        elif (place := int(torch.randint(self._seen, (), generator=self._rng))) < self._most:
            self._rows[place] = tuple(one.clone() for one in row)  # a view would keep its whole batch

    def means(self) -> tuple[Tensor, list[Tensor]]:
        """Class numbers of the events, ascending, ``(E,)``, and means by event: the teacher's belief, each modality's.

        Returns:
            Float32 tensors of shapes ``(E, C)`` and ``(E, *positions, d)``.
        """
        known = sorted(self._sums)
        means = [torch.stack([self._sums[k][part] / self._counts[k] for k in known]) for part in range(self._parts)]
        return torch.tensor(known, device=means[0].device), [one.float() for one in means]

    @property
    def _parts(self) -> int:
        return len(next(iter(self._sums.values())))

    def kept(self) -> list[Tensor]:
        """Of the examples held: rows of their events in :meth:`means`, the teacher's beliefs, pooled embeddings."""
        labels, *others = (torch.stack(parts) for parts in zip(*self._rows, strict=True))
        known = torch.tensor(sorted(self._sums), device=labels.device)
        return [torch.searchsorted(known, labels), *others]
