"""FedDecorr: features should not repeat each other."""

import torch
from torch import Tensor


def decorrelation_loss(features: Tensor, eps: float = 1e-8) -> Tensor:
    r"""Mean squared correlation between different features over a batch, in units that grow with the batch.

    .. math:: \frac{1}{B\,d\,(d - 1)} \sum_{a \ne b} R_{ab}^2, \quad R = \hat{x}^\top \hat{x}

    where :math:`\hat{x}` are the features centred and divided by :math:`\sqrt{\mathrm{var} + \epsilon}` (unbiased).

    Args:
        features: Shape ``(B, d)``.
        eps: :math:`\epsilon`; a constant feature correlates with nothing.

    Returns:
        Scalar, at most about :math:`(B - 1)^2 / B` (all features alike); 0 for one example or one feature.

    Raises:
        ValueError: If ``features`` are not of shape ``(B, d)``.

    Example:
        >>> column = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
        >>> decorrelation_loss(column.expand(4, 2))  # 3**2 / 4
        tensor(2.2500)

    Source: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning",
    ICLR 2023, the FedDecorr loss (https://arxiv.org/abs/2210.00226).

    Deviation: as in the authors' code, the paper's squared Frobenius norm of the correlations over :math:`d^2` leaves
    out the diagonal, and is multiplied by :math:`(B - 1)^2 / B`: what strength fits depends on the batch size.
    """
    if features.dim() != 2:
        raise ValueError(f"`features` must be of shape (B, d), got {tuple(features.shape)}.")
    count, width = features.shape
    if count < 2 or width < 2:
        return features[:0].sum()  # a zero with a gradient
    scaled = (features - features.mean(dim=0)) / (features.var(dim=0) + eps).sqrt()
    products = scaled.T @ scaled
    others = products - torch.diag(products.diagonal())
    return others.square().sum() / (width * (width - 1) * count)
