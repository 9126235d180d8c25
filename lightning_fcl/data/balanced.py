"""Class-balanced batches of a client's own examples and class anchors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fcl._heads import inputs_and_targets, replaced_output
from lightning_fcl.data.labels import find_labels
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.class_anchors import AnchorSet
from lightning_fcl.functional.dual_branch import class_balanced_batch


class BalancedBatches:
    """Draws batches in which each class has the same quota, from one client's loader and anchors.

    Labels are read once: where the dataset stores them, at no cost, else by one pass over it.

    Args:
        loader: The client's training loader; its dataset and collate function are used.
        anchors: On the CPU or the client's device; ``None`` or empty for none.
        num_classes: Classes are in ``[0, num_classes)``.
        generator: Draws the batches, apart from torch's own.

    Attributes:
        present: How many classes the client holds.
    """

    def __init__(self, loader: Any, anchors: AnchorSet | None, num_classes: int, generator: torch.Generator) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.labels = torch.from_numpy(find_labels(self.dataset))
        self.anchors = anchors if anchors is not None and len(anchors.targets) else None
        self.num_classes = num_classes
        self.generator = generator
        self.present = len(set(self.labels.tolist()))
        none = torch.zeros(0, dtype=torch.long)
        self._anchor_labels = none if self.anchors is None else self.anchors.targets.cpu()

    def draw(self, size: int, part: slice | None = None) -> tuple[Any, Tensor]:
        """A batch of local examples, and which anchor takes each place.

        Args:
            size: Places.
            part: Of them, those that are wanted; by default all. If it is empty, the first one.

        Returns:
            The collated batch, with a local example in every place, and int64 ``(size,)``: the anchor that is to
            replace it, or -1.
        """
        drawn = class_balanced_batch(self.labels, self._anchor_labels, size, self.num_classes, self.generator)
        if part is not None:
            drawn = drawn[part] if len(drawn[part]) else drawn[:1]
        anchor = torch.where(drawn < len(self.labels), -1, drawn - len(self.labels))
        local = torch.where(anchor < 0, drawn, 0)  # the first example keeps an anchor's place
        if hasattr(self.dataset, "take"):  # stacked already
            return self.dataset.take(local), anchor
        return self.collate([self.dataset[i] for i in local.tolist()]), anchor

    @contextmanager
    def placed(self, batch: Any, anchor: Tensor, layer: nn.Module | None = None) -> Iterator[Any]:
        """Puts anchors into a batch that :meth:`draw` made and that has come to the model's device.

        Args:
            batch: Inputs and labels.
            anchor: As :meth:`draw` gave it.
            layer: Where inputs cannot be replaced, the module whose output is replaced, while the context lasts.

        Yields:
            The batch with anchors in their places.

        Raises:
            MisconfigurationError: If an anchor has another shape than the inputs.
        """
        rows = (anchor >= 0).nonzero().squeeze(1)
        if self.anchors is None or not len(rows):
            yield batch
            return
        inputs, targets = inputs_and_targets(batch)
        rows = rows.to(targets.device)
        chosen = anchor.to(targets.device)[rows]
        targets = targets.index_copy(0, rows, self.anchors.targets.to(targets.device, targets.dtype)[chosen])
        values = self.anchors.inputs.to(targets.device)[chosen]

        def put(_: Any, output: Tensor) -> Tensor:
            return _replaced(output, rows, values)

        if layer is not None:
            with replaced_output(layer, put):
                yield _with(batch, inputs, targets)
        else:
            yield _with(batch, _replaced(inputs, rows, values), targets)


def _replaced(inputs: Any, rows: Tensor, values: Tensor) -> Tensor:
    if not isinstance(inputs, Tensor) or inputs.shape[1:] != values.shape[1:]:
        found = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise MisconfigurationError(
            f"Anchors must have the shape of the inputs that they replace, {found}, got {tuple(values.shape[1:])}. "
            "Give examples of one shape, or name an embedding in `input_module`."
        )
    return inputs.index_copy(0, rows, values.to(inputs.dtype))


def _with(batch: Any, inputs: Any, targets: Tensor) -> Any:
    if isinstance(batch, Mapping):
        key = "labels" if "labels" in batch else "label"
        return {**(inputs if isinstance(inputs, Mapping) else batch), key: targets}
    return [inputs, targets, *batch[2:]]
