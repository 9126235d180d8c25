"""Gradient episodic memory: the nearest gradient that does not raise the loss on what was stored."""

import torch
from torch import Tensor


def gem_project(gradient: Tensor, memories: Tensor, margin: float = 0.0, ridge: float = 0.0) -> Tensor:
    r"""Project a gradient so that it agrees with the gradient of every stored task.

    .. math:: \tilde g = g + G^\top v^\star, \qquad v^\star = \arg\min_{v \ge \gamma}
        \tfrac12 v^\top (G G^\top + \epsilon I) v + (G g)^\top v

    If no product :math:`\langle g, G_k \rangle` is negative, the gradient stays as it is.

    Args:
        gradient: Shape ``(P,)``.
        memories: Gradients on the stored tasks, shape ``(t, P)``.
        margin: :math:`\gamma \ge 0`; once a constraint is violated, it pushes along *all* memories.
        ridge: :math:`\epsilon \ge 0`, in squared units of the gradient. The authors use 1e-3, which stops small
            gradients from being projected; the solver needs none.

    Returns:
        Shape ``(P,)``, in the dtype of ``gradient``; products and solution are formed in float64.

    Raises:
        ValueError: If shapes do not fit.

    Example:
        >>> gem_project(torch.tensor([1.0, -1.0]), torch.tensor([[0.0, 1.0]]))
        tensor([1., 0.])
        >>> gem_project(torch.tensor([1.0, -0.1]), torch.tensor([[0.0, 1.0]]), margin=0.5)
        tensor([1.0000, 0.4000])

    Source: Lopez-Paz & Ranzato, "Gradient Episodic Memory for Continual Learning", NeurIPS 2017, eq. 11
    (https://arxiv.org/abs/1706.08840); margin and ridge as in the authors' code.

    Deviation: solved exactly by an active set, not by a general quadratic program; no ridge by default.
    """
    if gradient.dim() != 1 or memories.dim() != 2 or memories.shape[1:] != gradient.shape:
        raise ValueError(
            f"`memories` must have shape (t, P) for a `gradient` of shape (P,), got {tuple(memories.shape)} and "
            f"{tuple(gradient.shape)}."
        )
    rows, own = memories.double(), gradient.double()
    products = rows @ own
    if not len(rows) or bool((products >= 0).all()):
        return gradient.clone()
    gram = rows @ rows.T
    gram.diagonal().add_(ridge)
    shift = torch.full_like(products, margin)
    weights = nonnegative_minimum(gram, products + gram @ shift) + shift
    return (own + rows.T @ weights).to(gradient.dtype)


def agem_project(gradient: Tensor, reference: Tensor) -> Tensor:
    r"""Remove from a gradient what would raise the mean loss of the memory.

    .. math:: \tilde g = g - \frac{\langle g, r \rangle}{\langle r, r \rangle} r \quad \text{if } \langle g, r \rangle <
    0

    Args:
        gradient: Shape ``(P,)``.
        reference: Gradient on a batch of the memory, shape ``(P,)``.

    Returns:
        Shape ``(P,)``, in the dtype of ``gradient``; products are formed in float64.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> agem_project(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 2.0]))
        tensor([1., 0.])

    Source: Chaudhry et al., "Efficient Lifelong Learning with A-GEM", ICLR 2019, eq. 11
    (https://arxiv.org/abs/1812.00420).

    Deviation: None.
    """
    if gradient.dim() != 1 or gradient.shape != reference.shape:
        raise ValueError(
            f"`reference` must have the shape (P,) of `gradient`, got {tuple(reference.shape)} for "
            f"{tuple(gradient.shape)}."
        )
    own, other = gradient.double(), reference.double()
    product = own @ other
    if product >= 0:
        return gradient.clone()
    return (own - product / (other @ other) * other).to(gradient.dtype)


def nonnegative_minimum(matrix: Tensor, linear: Tensor) -> Tensor:
    r"""Minimum of a convex quadratic over vectors without negative entries, exact up to rounding.

    .. math:: \arg\min_{u \ge 0} \tfrac12 u^\top M u + b^\top u

    An active-set method in the manner of Lawson and Hanson: entries join where the slope is steepest and leave where
    they would turn negative. It ends after finitely many steps and also serves a singular ``matrix``, for which several
    minima may exist.

    Args:
        matrix: :math:`M`, symmetric, no negative eigenvalue, shape ``(t, t)``, float64.
        linear: :math:`b`, shape ``(t,)``, float64; in the range of ``matrix``, as ``A g`` is for ``matrix = A A^T``.

    Returns:
        :math:`u`, shape ``(t,)``.

    Example:
        >>> nonnegative_minimum(torch.eye(2).double(), torch.tensor([-1.0, 3.0]).double())
        tensor([1., 0.], dtype=torch.float64)

    Source: Lawson & Hanson, "Solving Least Squares Problems", Prentice-Hall 1974, algorithm 23.10.

    Deviation: works on the normal equations, scaled to a diagonal of ones.
    """
    size = matrix.diagonal().sqrt()
    alive = size > 0
    size = torch.where(alive, size, 1.0)
    scaled, slope_at_zero = matrix / (size[:, None] * size), linear / size
    tolerance = 1e-12 * max(1e-300, float(slope_at_zero.abs().max())) if len(linear) else 0.0
    solution, free = torch.zeros_like(linear), torch.zeros_like(alive)
    for _ in range(3 * len(linear) + 1):
        slope = torch.where(free | ~alive, torch.inf, scaled @ solution + slope_at_zero)
        if not len(slope) or slope.min() >= -tolerance:
            break
        free[slope.argmin()] = True
        while True:
            target = torch.zeros_like(solution)
            target[free] = torch.linalg.solve(scaled[free][:, free], -slope_at_zero[free])
            if bool((target[free] > 0).all()):
                break
            falling = free & (target <= 0)
            share = (solution[falling] / (solution[falling] - target[falling]).clamp(min=1e-300)).min()
            solution = solution + share * (target - solution)
            free &= solution > tolerance
            solution[~free] = 0.0
        solution = target
    return solution / size
