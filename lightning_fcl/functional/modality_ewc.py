"""EWC by groups of parameters: a strength for each, and importances on one scale."""

from collections.abc import Collection, Mapping
from typing import Literal

from torch import Tensor

from lightning_fcl.exceptions import ParamMismatchError
from lightning_fcl.functional.ewc import ewc_penalty, ewc_penalty_grad
from lightning_fcl.functional.params import check_same_shapes, total
from lightning_fcl.types import Params

Groups = Mapping[str, Collection[str]]
"""Parameter names by group: every name in exactly one."""


def grouped_ewc_penalty(
    params: Params, anchor: Params, importance: Params, groups: Groups, strengths: Mapping[str, float]
) -> dict[str, Tensor]:
    r"""EWC's price, group by group.

    .. math:: \tfrac{\lambda_M}{2} \sum_{i \in M} F_i (\theta_i - \theta^\star_i)^2

    With one strength for all groups the sum is plain EWC.

    Args:
        params: Weights being trained.
        anchor: Weights at the end of the earlier task; same names and shapes.
        importance: Diagonal Fisher information, not negative; same names and shapes.
        groups: Parameter names by group; a partition of the names of ``params``.
        strengths: :math:`\lambda_M` by group, unitless.

    Returns:
        A scalar by group; gradients reach ``params``.

    Raises:
        ParamMismatchError: If names or shapes differ, or ``groups`` is no partition of the names.

    Example:
        >>> import torch
        >>> new, old, fisher = ({"a": torch.tensor([x]), "b": torch.tensor([x])} for x in (3.0, 1.0, 0.5))
        >>> groups, strengths = {"vision": ["a"], "language": ["b"]}, {"vision": 1.0, "language": 9.0}
        >>> grouped_ewc_penalty(new, old, fisher, groups, strengths)
        {'vision': tensor(1.), 'language': tensor(9.)}

    Source: FedCMM, "Modality-aware elastic weight consolidation" (https://arxiv.org/abs/2607.12112).

    Deviation: the paper has one strength; with it the formula is Kirkpatrick et al.'s, whatever the groups.
    """
    check_same_shapes(params=params, anchor=anchor, importance=importance)
    check_partition(params, groups)
    prices: dict[str, Tensor] = {}
    for group, names in groups.items():
        now, then, weight = (pick(tree, names) for tree in (params, anchor, importance))
        prices[group] = ewc_penalty(now, then, weight, strengths[group])
    return prices


def grouped_ewc_penalty_grad(
    params: Params, anchor: Params, importance: Params, groups: Groups, strengths: Mapping[str, float]
) -> dict[str, Tensor]:
    """Gradient of the sum of :func:`grouped_ewc_penalty` with respect to ``params``.

    Args:
        params: As there.
        anchor: As there.
        importance: As there.
        groups: As there.
        strengths: As there.

    Returns:
        One tensor per name, shaped like ``params``.

    Raises:
        ParamMismatchError: As there.

    Example:
        >>> import torch
        >>> new, old, fisher = ({"a": torch.tensor([x])} for x in (3.0, 1.0, 0.5))
        >>> grouped_ewc_penalty_grad(new, old, fisher, {"vision": ["a"]}, {"vision": 10.0})
        {'a': tensor([10.])}

    Source: as :func:`grouped_ewc_penalty`.

    Deviation: as there.
    """
    check_same_shapes(params=params, anchor=anchor, importance=importance)
    check_partition(params, groups)
    gradients: dict[str, Tensor] = {}
    for group, names in groups.items():
        now, then, weight = (pick(tree, names) for tree in (params, anchor, importance))
        gradients |= ewc_penalty_grad(now, then, weight, strengths[group])
    return gradients


def normalise_importance(
    importance: Params, groups: Groups, how: Literal["none", "global", "per_group"] = "per_group"
) -> dict[str, Tensor]:
    r"""Importances with a mean of 1, so that a strength means the same for every group, task and client.

    .. math:: F_i \leftarrow F_i \Big/ \tfrac{1}{|M|} \sum_{j \in M} F_j

    Args:
        importance: Diagonal Fisher information by parameter name.
        groups: Parameter names by group; a partition.
        how: ``"per_group"``: the mean over a group's elements; ``"global"``: over all elements, which leaves the
            proportions between groups; ``"none"``: as it is.

    Returns:
        A tree like ``importance``; a group whose importances are all 0 stays 0.

    Raises:
        ParamMismatchError: If ``groups`` is no partition of the names.
        ValueError: If ``how`` is another word.

    Example:
        >>> import torch
        >>> fisher = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([100.0])}
        >>> normalise_importance(fisher, {"vision": ["a"], "language": ["b"]})
        {'a': tensor([0.5000, 1.5000]), 'b': tensor([1.])}

    Source: ours. FedCMM says that importances are "separate" for each modality and shows that this matters, yet its
    formula is plain EWC; a scale for each group is the simplest reading under which the two differ.

    Deviation: the paper's formula is ``"none"``.
    """
    if how not in ("none", "global", "per_group"):
        raise ValueError(f'`how` must be "none", "global" or "per_group", got {how!r}.')
    check_partition(importance, groups)
    if how == "none":
        return dict(importance)
    scaled: dict[str, Tensor] = {}
    for names in groups.values() if how == "per_group" else [list(importance)]:
        count = max(1, sum(importance[name].numel() for name in names))
        mean = total(importance[name].double().sum() for name in names) / count
        scaled |= {
            name: importance[name] / mean.to(importance[name].dtype) if mean else importance[name] for name in names
        }
    return {name: scaled[name] for name in importance}


def balanced_strengths(importance: Params, new: Params, groups: Groups, tasks: int = 1) -> dict[str, float]:
    r"""Strengths at which each earlier task's pull is on average as stiff as the new task's loss.

    .. math:: \lambda_M = \frac{\sum_{i \in M} F^{new}_i}{\tfrac1T \sum_{i \in M} F_i}

    The Fisher information of the new task's data stands for the curvature of its loss. If all curvatures of a group are
    alike, its weights then go half way from the old optimum to the new one after the first task, and always to the mean
    of all tasks' optima. The scale of ``importance`` cancels.

    Args:
        importance: Sum of the earlier tasks' importances by parameter name, on any scale.
        new: Fisher diagonal of the new task's data at the weights where it starts; same names and shapes.
        groups: Parameter names by group; a partition.
        tasks: :math:`T`, how many tasks are in ``importance``.

    Returns:
        A strength by group, unitless; 0 for a group that no earlier task needs.

    Raises:
        ParamMismatchError: If names or shapes differ, or ``groups`` is no partition of the names.
        ValueError: If ``tasks`` is below 1.

    Example:
        >>> import torch
        >>> old, new = ({"a": torch.tensor([value, value])} for value in (2.0, 6.0))
        >>> balanced_strengths(old, new, {"vision": ["a"]})
        {'vision': 3.0}

    Source: ours; the balance of two quadratics, as in online Laplace approximation, where each task counts alike.

    Deviation: the paper has one strength, 500, found by search.
    """
    if tasks < 1:
        raise ValueError(f"`tasks` must be at least 1, got {tasks}.")
    check_same_shapes(importance=importance, new=new)
    check_partition(importance, groups)
    strengths: dict[str, float] = {}
    for group, names in groups.items():
        old, wanted = (float(total(tree[name].double().sum() for name in names)) for tree in (importance, new))
        strengths[group] = tasks * wanted / old if old else 0.0
    return strengths


def pick(tree: Params, names: Collection[str]) -> dict[str, Tensor]:
    """The part of a tree that ``names`` holds."""
    return {name: tree[name] for name in names}


def check_partition(params: Params, groups: Groups) -> None:
    """Raise ParamMismatchError unless each name of ``params`` is in exactly one group."""
    listed = [name for names in groups.values() for name in names]
    strays = sorted(params.keys() ^ set(listed)) or sorted({name for name in listed if listed.count(name) > 1})
    if strays:
        raise ParamMismatchError(f"`groups` must hold each parameter once, got too few or too many of {strays[:3]}.")
