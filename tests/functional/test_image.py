"""Peak signal-to-noise ratio."""

import math

import pytest
import torch

from lightning_fcl.functional import psnr


@pytest.mark.parametrize(("error", "decibels"), [(0.01, 20.0), (0.0225, 16.478175), (0.0151, 18.22), (0.0455, 13.42)])
def test_worked_values(error, decibels):
    image = torch.full((3, 8, 8), 0.5, dtype=torch.float64)
    assert psnr(image, image + math.sqrt(error)) == pytest.approx(decibels, abs=0.011 if decibels < 19 else 1e-9)


def test_scale_and_equality():
    image = torch.rand(3, 4, 4)
    assert psnr(image, image) == math.inf
    assert psnr(255 * image, 255 * image.flip(0), peak=255.0) == pytest.approx(psnr(image, image.flip(0)), rel=1e-5)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`image` and `reference` must have the same shape, got \(2,\) and \(1,\)"):
        psnr(torch.ones(2), torch.ones(1))
    with pytest.raises(ValueError, match="`peak` must be positive, got 0"):
        psnr(torch.ones(2), torch.ones(2), peak=0)
