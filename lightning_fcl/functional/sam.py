"""Sharpness-aware minimisation: where in a small ball around the weights the loss is worst, to first order."""

import torch
from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes, norm
from lightning_fcl.types import Params

_SMALL = 1e-12


def sam_offset(gradient: Params, radius: float) -> dict[str, Tensor]:
    r"""The step of length ``radius`` along the gradient.

    .. math:: \epsilon = \rho \, g / \|g\|

    Args:
        gradient: Gradient of the loss by name.
        radius: :math:`\rho \ge 0`, in units of the weights.

    Returns:
        Offsets by name, whose norm over all names is ``radius``; zero if the gradient is (norm up to 1e-12).

    Example:
        >>> sam_offset({"w": torch.tensor([3.0, 4.0])}, radius=0.1)
        {'w': tensor([0.0600, 0.0800])}

    Source: Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021, eq. 2 for
    p = 2 (https://arxiv.org/abs/2010.01412).

    Deviation: None.
    """
    return _scaled(gradient, radius, norm(gradient))


def asam_offset(params: Params, gradient: Params, radius: float, offset: float = 0.0) -> dict[str, Tensor]:
    r"""The worst step in a ball that is measured relative to each weight's own size.

    .. math:: \epsilon = \rho \, T^2 g / \|T g\|, \qquad T = |\theta| + \eta

    ``T`` is 1 for tensors whose name does not end in ``weight``. With ``offset=0``, scaling a layer's weights by a
    factor scales the step by the same factor.

    Args:
        params: Weights by name.
        gradient: Gradient of the loss; same names and shapes.
        radius: :math:`\rho \ge 0`, unitless.
        offset: :math:`\eta \ge 0`, so that weights near zero can move.

    Returns:
        Offsets by name; zero if the gradient is.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> weight, slope = {"weight": torch.tensor([1.0, -2.0])}, {"weight": torch.tensor([3.0, 4.0])}
        >>> asam_offset(weight, slope, radius=0.1)
        {'weight': tensor([0.0351, 0.1873])}

    Source: Kwon et al., "ASAM: Adaptive Sharpness-Aware Minimization", ICML 2021, sec. 3
    (https://arxiv.org/abs/2102.11600).

    Deviation: biases and other tensors that are no ``weight`` keep ``T = 1``, as in the authors' code.
    """
    check_same_shapes(params=params, gradient=gradient)
    sizes = {n: params[n].abs() + offset if n.endswith("weight") else torch.ones_like(params[n]) for n in params}
    scaled = {name: sizes[name] * gradient[name] for name in params}
    return _scaled({name: sizes[name] * scaled[name] for name in params}, radius, norm(scaled))


def _scaled(direction: Params, radius: float, length: Tensor) -> dict[str, Tensor]:
    factor = torch.where(length > _SMALL, radius / length.clamp(min=_SMALL), 0.0)
    return {name: value * factor.to(value.dtype) for name, value in direction.items()}
