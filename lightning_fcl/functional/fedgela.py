"""FedGELA: one fixed classifier for all clients, each class scaled by what the client has of it."""

import math

import torch
from torch import Tensor


def simplex_etf(num_classes: int, num_features: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Class directions that are as far from each other as can be: a simplex equiangular tight frame.

    .. math:: M = \sqrt{\tfrac{C}{C - 1}}\; Q\,(I_C - \tfrac{1}{C} 1 1^\top)

    with :math:`Q \in R^{d \times C}` orthonormal. Each direction has length 1, two of them the cosine
    :math:`-1 / (C - 1)`, and all of them add up to 0.

    Args:
        num_classes: :math:`C`, at least 2.
        num_features: :math:`d`, at least ``num_classes``.
        generator: Where :math:`Q` is drawn from; by default torch's global generator.

    Returns:
        :math:`M^\top`, shape ``(C, d)``, float32: the weight of a linear layer. Formed in float64.

    Raises:
        ValueError: If there are fewer than 2 classes, or fewer features than classes.

    Example:
        >>> frame = simplex_etf(3, 8, torch.Generator().manual_seed(0))
        >>> (frame @ frame.T).round(decimals=4)
        tensor([[ 1.0000, -0.5000, -0.5000],
                [-0.5000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]])

    Source: Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data", NeurIPS 2023,
    the frame of the global classifier (https://arxiv.org/abs/2405.18972).

    Deviation: :math:`Q` is made of normal numbers, so that no direction is preferred; the authors' code draws uniform
    ones.
    """
    if num_classes < 2:
        raise ValueError(f"`num_classes` must be at least 2, got {num_classes}.")
    if num_features < num_classes:
        raise ValueError(f"`num_features` must be at least `num_classes`, {num_classes}, got {num_features}.")
    drawn = torch.randn(num_features, num_classes, dtype=torch.float64, generator=generator)
    basis, triangle = torch.linalg.qr(drawn)
    basis = basis * triangle.diagonal().sign()  # the one Q whose R has a positive diagonal
    frame: Tensor = math.sqrt(num_classes / (num_classes - 1)) * (basis - basis.mean(dim=1, keepdim=True))
    return frame.T.float().contiguous()


def class_scale(counts: Tensor) -> Tensor:
    r"""Share of each class in a client's data, relative to an even one: :math:`\varphi_c = C\,n_c / n`.

    Args:
        counts: :math:`n_c`, examples per class, shape ``(C,)``; at least one in all.

    Returns:
        Shape ``(C,)``, float32, mean 1; 0 for an absent class, whose logit becomes 0, not :math:`-\infty`.

    Raises:
        ValueError: If there is no example.

    Example:
        >>> class_scale(torch.tensor([3, 1, 0]))
        tensor([2.2500, 0.7500, 0.0000])

    Source: Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data", NeurIPS 2023,
    the local adaptation (https://arxiv.org/abs/2405.18972).

    Deviation: None.
    """
    count = counts.sum()
    if count <= 0:
        raise ValueError(f"`counts` must count at least one example, got {counts.tolist()}.")
    return (len(counts) * counts.double() / count.double()).float()
