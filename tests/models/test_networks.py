"""The networks: sizes known from the literature, output shapes, and what their norms keep."""

import pytest
import torch
from torch import nn

from lightning_fcl.models import LeNet, ResNet18, SmallConvNet


def count(tensors):
    return sum(tensor.numel() for tensor in tensors)


def test_resnet18_has_the_known_size():
    net = ResNet18(num_classes=10, stem="7x7")
    assert count(net.parameters()) == 11_181_642
    floats = [tensor for tensor in net.state_dict().values() if tensor.is_floating_point()]
    assert count(floats) == 11_191_242  # and the running means and variances of 4,800 channels


def test_resnet18_for_a_thousand_classes_has_the_known_size():
    assert count(ResNet18(num_classes=1000, stem="7x7").parameters()) == 11_689_512


def test_groupnorm_has_no_buffers_and_as_many_parameters():
    net = ResNet18(norm="group", stem="7x7")
    assert list(net.buffers()) == []
    assert count(net.parameters()) == 11_181_642
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("stem", "size", "side"), [("3x3", 32, 4), ("7x7", 64, 2)])
def test_resnet18_shapes(norm, stem, size, side):
    net = ResNet18(num_classes=7, in_channels=1, norm=norm, stem=stem).eval()
    images = torch.randn(2, 1, size, size)
    with torch.no_grad():
        features = net.stages(net.stem(images))
        assert features.shape == (2, 512, side, side)
        assert net(images).shape == (2, 7)
        assert torch.equal(net(images), net.head(features.mean(dim=(2, 3))))


def test_only_groupnorm_trains_on_a_single_pixel():
    image = torch.randn(1, 3, 32, 32)  # one pixel is left of it in the last stage
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ResNet18(stem="7x7")(image)
    net = ResNet18(stem="7x7", norm="group")
    nn.functional.cross_entropy(net(image), torch.tensor([3])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert net.stem[0].weight.grad.abs().max() > 0


def test_resnet18_block_by_hand():
    block = ResNet18().stages[1][0].eval()
    x = torch.randn(2, 64, 8, 8)
    conv1, norm1, _, conv2, norm2 = block.body
    down, norm3 = block.shortcut
    with torch.no_grad():
        main = norm2(conv2(norm1(conv1(x)).relu()))
        assert torch.equal(block(x), (main + norm3(down(x))).relu())
        same = ResNet18().stages[0][0].eval()
        assert torch.equal(same(x), (same.body(x) + x).relu())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer"}, "`norm` must be 'batch' or 'group', got 'layer'"),
        ({"stem": "5x5"}, "`stem` must be '3x3' or '7x7', got '5x5'"),
    ],
)
def test_resnet18_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        ResNet18(**options)


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (12, 1)])
def test_lenet(size, channels):
    net = LeNet(num_classes=7, in_channels=channels, image_size=size)
    assert net(torch.randn(2, channels, size, size)).shape == (2, 7)


def test_lenet_has_the_known_size():
    assert count(LeNet().parameters()) == 61_706  # as in the paper's layer sizes with 16 x 25 features, fully connected


def test_lenet_is_for_images_of_twelve_pixels_and_more():
    with pytest.raises(ValueError, match="`image_size` must be at least 12, got 11"):
        LeNet(image_size=11)


@pytest.mark.parametrize(("size", "channels", "width"), [(16, 1, 16), (8, 3, 4), (32, 3, 8)])
def test_small_conv_net(size, channels, width):
    net = SmallConvNet(num_classes=7, in_channels=channels, image_size=size, width=width, hidden=5)
    assert net(torch.randn(2, channels, size, size)).shape == (2, 7)
    assert list(net.buffers()) == []
    by_hand = (9 * channels + 1) * width + (9 * width + 1) * 2 * width + (2 * width * (size // 4) ** 2 + 1) * 5 + 6 * 7
    assert count(net.parameters()) == by_hand


@pytest.mark.parametrize("size", [0, 18])
def test_small_conv_net_needs_a_multiple_of_four(size):
    with pytest.raises(ValueError, match=f"`image_size` must be a multiple of 4, got {size}"):
        SmallConvNet(image_size=size)


@pytest.mark.parametrize("make", [LeNet, ResNet18, SmallConvNet])
def test_the_seed_decides_the_first_weights(make):
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([parameter.flatten() for parameter in make().parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
