"""MOON: features nearer to the global model's than to the client's own old ones."""

import math

from torch import Tensor
from torch.nn import functional as F


def model_contrastive_loss(
    features: Tensor, global_features: Tensor, previous_features: Tensor, temperature: float = 0.5
) -> Tensor:
    r"""Contrast of a model's features with those of two other models on the same inputs.

    .. math:: -\log \frac{e^{s(u, u^{g}) / \tau}}{e^{s(u, u^{g}) / \tau} + e^{s(u, u^{prev}) / \tau}}

    with :math:`s` the cosine. It is :math:`\log 2` where the two others agree.

    Args:
        features: :math:`u`, of the model being trained, shape ``(B, d)``.
        global_features: :math:`u^{g}`, of the server's model, shape ``(B, d)``.
        previous_features: :math:`u^{prev}`, of the client's model after its last local training, shape ``(B, d)``.
        temperature: :math:`\tau > 0`.

    Returns:
        Scalar in nats, mean over the batch; gradients reach ``features`` only.

    Raises:
        ValueError: If the shapes are not all ``(B, d)``, or ``temperature`` is not positive.

    Example:
        >>> import torch
        >>> ahead, behind = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
        >>> model_contrastive_loss(ahead, ahead, behind)  # log(1 + exp(-4))
        tensor(0.0181)

    Source: Li, He & Song, "Model-Contrastive Federated Learning", CVPR 2021, the model-contrastive loss (https://arxiv.org/abs/2103.16257).

    Deviation: None.
    """
    shapes = [tuple(one.shape) for one in (features, global_features, previous_features)]
    if features.dim() != 2 or len(set(shapes)) > 1:
        raise ValueError(
            f"`features`, `global_features`, `previous_features` must be of one shape (B, d), got {shapes}."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}.")
    nearer = F.cosine_similarity(features, global_features.detach(), dim=1)
    farther = F.cosine_similarity(features, previous_features.detach(), dim=1)
    return F.softplus((farther - nearer) / temperature).mean()
