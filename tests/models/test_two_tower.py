"""The two-tower classifier: shapes, adapters, groups, padding."""

import pytest
import torch
from torch import nn

from lightning_fcl.models import EventClassifier, LowRankLinear, TwoTower, event_log_likelihood


def batch(count=4):
    return torch.randn(count, 3, 16, 16), torch.randint(1, 512, (count, 16)), torch.arange(count) % 7


def test_adapters_start_as_the_frozen_layer_and_train_alone():
    layer, x = LowRankLinear(5, 3, rank=2), torch.randn(4, 5)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["down", "up"]
    with torch.no_grad():
        layer.up.normal_()
    merged = layer.weight + layer.up @ layer.down
    torch.testing.assert_close(layer(x), nn.functional.linear(x, merged, layer.bias))
    assert [name for name, _ in LowRankLinear(5, 3, rank=0).named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("rank", [0, 4])
def test_three_groups_hold_all_that_is_trained(rank):
    names = [name for name, p in TwoTower(rank=rank).named_parameters() if p.requires_grad]
    assert {name.split(".")[0] for name in names} == {"vision", "projector", "language"}


def test_all_adapters_and_the_head_learn():
    module, (pictures, tokens, labels) = EventClassifier(TwoTower()), batch()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("up"):
                p.normal_()
    nn.functional.cross_entropy(module(pictures, tokens), labels).backward()
    assert [name for name, p in module.named_parameters() if p.requires_grad and not p.grad.abs().sum()] == []


def test_where_a_cue_stands_in_the_text_does_not_matter():
    net, (pictures, tokens, _) = TwoTower(), batch()
    torch.testing.assert_close(net(pictures, tokens), net(pictures, tokens.flip(1)))


def test_log_likelihood_is_the_cross_entropy_per_post():
    module, posts = EventClassifier(TwoTower()), batch()
    each = event_log_likelihood(module, posts)
    torch.testing.assert_close(-each.mean(), nn.functional.cross_entropy(module(*posts[:2]), posts[2]))
    assert each.shape == (4,)


def test_pictures_must_be_cut_into_whole_patches():
    with pytest.raises(ValueError, match=r"`image_size` must be a multiple of `patch` \(4\), got 18"):
        TwoTower(image_size=18)
