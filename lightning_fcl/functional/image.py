"""How closely one image repeats another."""

import torch
from torch import Tensor


def psnr(image: Tensor, reference: Tensor, peak: float = 1.0) -> float:
    r"""Peak signal-to-noise ratio: :math:`10 \log_{10} (\mathrm{peak}^2 / \mathrm{MSE})`.

    As a measure of privacy, take the largest value over all training images that ``image`` might repeat.

    Args:
        image: Any shape, any float dtype, values in ``[0, peak]``.
        reference: Same shape.
        peak: Largest possible value, positive.

    Returns:
        Decibels, from the mean squared error over all elements; infinity for equal images.

    Raises:
        ValueError: If the shapes differ, there are no elements, or ``peak`` is not positive.

    Example:
        >>> round(psnr(torch.full((3, 2, 2), 0.5), torch.full((3, 2, 2), 0.4)), 4)  # MSE 0.01
        20.0

    Source: FedADB, privacy of class anchors.

    Deviation: None.
    """
    if image.shape != reference.shape or not image.numel():
        raise ValueError(
            f"`image` and `reference` must have the same shape, got {tuple(image.shape)} and {tuple(reference.shape)}."
        )
    if not peak > 0:
        raise ValueError(f"`peak` must be positive, got {peak}. Use 1 for images in [0, 1].")
    error = (image.detach().double() - reference.detach().double()).square().mean()
    return (10.0 * torch.log10(peak**2 / error)).item()
