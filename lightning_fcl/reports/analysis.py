"""What the final model of a run, and the anchors it last made, look like from inside."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import lightning as L
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lightning_fcl import functional as F
from lightning_fcl._heads import call, find_head, inputs_and_targets, modes_kept
from lightning_fcl._imports import optional_import
from lightning_fcl.functional.class_anchors import AnchorSet
from lightning_fcl.reports import analysis_figures as draw
from lightning_fcl.reports.curvature import top_eigenvalues

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.reports.run_report import RunReport

PARTS: Final = ("hessian", "features", "prototypes", "psnr")
NEED_ANCHORS: Final = ("prototypes", "psnr")


@dataclass
class Analysis:
    """Figures and numbers of one run.

    Args:
        pictures: PNG by file name.
        numbers: Plain values by part.
    """

    pictures: dict[str, bytes] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)


def analyse(
    report: "RunReport",
    module: L.LightningModule,
    stream: "TaskStream",
    anchors: AnchorSet | None,
    *,
    parts: Sequence[str] = PARTS,
    examples: int = 1000,
    method: str = "pca",
) -> Analysis:
    """Look at a finished run's model and anchors.

    Args:
        report: The run.
        module: With the run's final weights.
        stream: The run's stream. Training examples of all clients are read: this is for simulations.
        anchors: The anchors of the last round; parts that need them are left out without.
        parts: ``"hessian"``: five largest eigenvalues of the training loss and their ratio. ``"features"``: anchors
            among real features in the plane. ``"prototypes"``: cosine of each anchor's feature with each class's mean
            feature. ``"psnr"``: how closely anchors repeat training images.
        examples: At most so many training examples (for ``"psnr"``, all are compared).
        method: ``"pca"`` or ``"tsne"``.

    Returns:
        Pictures and numbers.

    Raises:
        MissingExtraError: If a package is missing (extra ``analyse``).
    """
    result = Analysis()
    with modes_kept(module, training=False):
        inputs, labels = _training_data(stream)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:examples]
        some, some_labels = inputs[order], labels[order]
        if "hessian" in parts:
            _hessian(result, module, some, some_labels)
        features = _features(module, some) if {"features", "prototypes"} & set(parts) else None
        made = None if anchors is None or features is None else _features(module, anchors.inputs)
        if "features" in parts and features is not None:
            _plane(result, features, some_labels, made, anchors, method)
        if "prototypes" in parts and features is not None and made is not None and anchors is not None:
            _prototypes(result, features, some_labels, made, anchors)
        if "psnr" in parts and anchors is not None and anchors.inputs.dim() == 4:
            _psnr(result, inputs, labels, anchors)
    return result


def _hessian(result: Analysis, module: L.LightningModule, inputs: Tensor, labels: Tensor) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return nnf.cross_entropy(_logits(module, batch[0]), batch[1])

    batches = [((x, y), len(y)) for x, y in zip(torch.split(inputs, 250), torch.split(labels, 250), strict=True)]
    values = top_eigenvalues(module, loss, batches)
    with torch.no_grad():
        right = torch.cat([_logits(module, x).argmax(1) == y for (x, y), _ in batches]).float().mean().item()
    anisotropy = values[0] / values[-1]
    result.numbers["hessian"] = {"eigenvalues": values, "anisotropy": anisotropy, "training accuracy": right}
    result.pictures["hessian.png"] = draw.bars(values, f"Hessian: λ1 {values[0]:.3g}, λ1/λ5 {anisotropy:.2f}")


def _plane(
    result: Analysis, features: Tensor, labels: Tensor, made: Tensor | None, anchors: AnchorSet | None, method: str
) -> None:
    both = features if made is None else torch.cat([features, made])
    if method == "tsne":
        maker: Any = optional_import("sklearn.manifold", extra="analyse").TSNE(random_state=0, init="pca")
    else:
        maker = optional_import("sklearn.decomposition", extra="analyse").PCA(2, random_state=0)
    points = torch.from_numpy(maker.fit_transform(both.double().numpy()))
    targets = None if anchors is None else anchors.targets.cpu()
    title = f"{method.upper().replace('TSNE', 't-SNE')} of features; stars are anchors"
    result.pictures["features.png"] = draw.plane(points[: len(labels)], labels, points[len(labels) :], targets, title)


def _prototypes(result: Analysis, features: Tensor, labels: Tensor, made: Tensor, anchors: AnchorSet) -> None:
    classes = torch.tensor(sorted(set(labels.tolist())))
    means = torch.stack([features[labels == c].mean(0) for c in classes])
    centre = features.mean(0)
    table = nnf.cosine_similarity((made - centre).unsqueeze(1), (means - centre).unsqueeze(0), dim=2)
    nearest = classes[table.argmax(1)] == anchors.targets.cpu()
    result.numbers["prototypes"] = {"nearest is own class": float(nearest.float().mean()), "cosine": table.tolist()}
    title = "Cosine of anchor and class mean (features, centred)"
    result.pictures["prototypes.png"] = draw.matrix(table, anchors.targets.tolist(), classes.tolist(), title)


def _psnr(result: Analysis, inputs: Tensor, labels: Tensor, anchors: AnchorSet) -> None:
    low, high = inputs.amin(), inputs.amax()
    rows, images = [], []
    for anchor, target in zip(anchors.inputs.cpu(), anchors.targets.tolist(), strict=True):
        members = ((inputs[labels == target] - low) / (high - low)).clamp(0, 1)
        if not len(members):
            continue
        own = ((anchor - low) / (high - low)).clamp(0, 1)
        errors = (members - own).square().flatten(1).mean(1)
        closest, mean = members[errors.argmin()], members.mean(0)
        rows.append({"class": target, "closest": F.psnr(own, closest), "mean": F.psnr(own, mean)})
        images.append([own, closest, mean])
    if rows:
        result.numbers["psnr"] = {"largest": max(row["closest"] for row in rows), "anchors": rows}
        result.pictures["psnr.png"] = draw.sheet(images, rows)


def _training_data(stream: "TaskStream") -> tuple[Tensor, Tensor]:
    """Inputs and labels of all clients in all tasks."""
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    for task in range(len(stream)):
        for client in stream.clients(task):
            for batch in stream.train_loader(task, client):
                for place, part in enumerate(inputs_and_targets(batch)):
                    found[place].append(part)
    return torch.cat(found[0]), torch.cat(found[1])


def _logits(module: L.LightningModule, inputs: Tensor) -> Tensor:
    return _through_head(module, inputs)[1]


def _features(module: L.LightningModule, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([_through_head(module, part.cpu())[0].flatten(1) for part in torch.split(inputs, 250)])


def _through_head(module: L.LightningModule, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the head takes and gives."""
    _, head = find_head(module, getattr(module, "feature_module", None))
    seen: list[tuple[Tensor, Tensor]] = []
    handle = head.register_forward_hook(lambda _, taken, given: seen.append((taken[0], given)))
    try:
        call(module, inputs)
    finally:
        handle.remove()
    return seen[-1]
