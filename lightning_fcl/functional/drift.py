"""How far groups of parameters have moved."""

from typing import NamedTuple

from lightning_fcl.functional.modality_ewc import Groups, check_partition, pick
from lightning_fcl.functional.params import check_same_shapes, norm, total
from lightning_fcl.types import Params


class GroupDrift(NamedTuple):
    """How far a group of parameters has moved; see :func:`group_drift`."""

    norm: float
    relative: float
    weighted: float


def group_drift(
    params: Params, anchor: Params, groups: Groups, importance: Params | None = None
) -> dict[str, GroupDrift]:
    r"""How far each group has moved since ``anchor``.

    ``norm`` is :math:`\lVert\theta - \theta^\star\rVert`, ``relative`` the same over :math:`\lVert\theta^\star\rVert`,
    ``weighted`` is :math:`\sqrt{\sum_i F_i (\theta_i - \theta^\star_i)^2}`, whose half square is about the
    Kullback-Leibler divergence (in nats) from the old predictions to the new ones on the data that the importance was
    measured on.

    Args:
        params: Weights now.
        anchor: Weights then; same names and shapes.
        groups: Parameter names by group; a partition.
        importance: Diagonal Fisher information at ``anchor``, not normalised; without it ``weighted`` is NaN.

    Returns:
        Three numbers by group.

    Raises:
        ParamMismatchError: If names or shapes differ, or ``groups`` is no partition of the names.

    Example:
        >>> import torch
        >>> new, old = {"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([0.0, 0.0])}
        >>> group_drift(new, old, {"vision": ["a"]}, {"a": torch.tensor([1.0, 0.0])})["vision"]
        GroupDrift(norm=5.0, relative=inf, weighted=3.0)

    Source: the second-order expansion of the divergence; FedCMM reports drift by modality.

    Deviation: the paper does not define its drift.
    """
    trees = {"params": params, "anchor": anchor} | ({} if importance is None else {"importance": importance})
    check_same_shapes(**trees)
    check_partition(params, groups)
    found: dict[str, GroupDrift] = {}
    for group, names in groups.items():
        moves = {name: params[name].double() - anchor[name].double() for name in names}
        length, start = norm(moves).item(), norm(pick(anchor, names)).item()
        weighted = float("nan")
        if importance is not None:
            weighted = total((importance[n].double() * moves[n].square()).sum() for n in names).sqrt().item()
        relative = length / start if start else (float("inf") if length else 0.0)
        found[group] = GroupDrift(length, relative, weighted)
    return found
