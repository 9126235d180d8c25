"""Squares of single samples' gradients, layer by layer, from a layer's inputs and the gradients of its outputs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_PAIRED_POSITIONS = 4  # up to here, products of pairs of positions cost less than a gradient per sample
_HELD_ELEMENTS = 2**22  # of gradients or unfolded inputs at once: 16 MB in float32

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVS = (nn.Conv1d, nn.Conv2d)


class Use(NamedTuple):
    """One call of a layer that owns a parameter."""

    layer: nn.Module
    part: str
    """The parameter's name in the layer."""
    inputs: Tensor
    """Of the layer, shape ``(N, ...)``."""
    grads: Tensor
    """Of its outputs, shape ``(N, ...)``: of the sum over samples, which is each sample's own."""

    def cut(self, start: int, end: int) -> "Use":
        """The same for some of the samples."""
        return self._replace(inputs=self.inputs[start:end], grads=self.grads[start:end])


def sum_of_squares(uses: Sequence[Use], shape: torch.Size) -> Tensor:
    """Sum over samples of the squared gradient of one parameter, exact where it is used several times.

    Args:
        uses: All calls of layers that own the parameter, over the same samples.
        shape: Of the parameter.

    Returns:
        That shape, in the precision of the gradients, at least float32.

    Raises:
        RuntimeError: If a layer of no known kind cannot be run by vmap.
    """
    uses = [use._replace(inputs=_wide(use.inputs), grads=_wide(use.grads)) for use in uses]
    if all(_is_outer(use) for use in uses):
        return _outer_squares(uses, shape)
    if all(type(use.layer) is nn.Embedding for use in uses):
        return _row_squares(uses, shape)
    total, count = uses[0].grads.new_zeros(shape), len(uses[0].grads)
    step = max(1, _HELD_ELEMENTS // math.prod(shape))
    for start in range(0, count, step):
        gradients = [_gradients(use.cut(start, start + step), shape) for use in uses]
        total += torch.stack(gradients).sum(0).square().sum(0) if len(uses) > 1 else gradients[0].square().sum(0)
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


# -- sums of outer products: the weights of linear layers and convolutions --------------------------------------------


def _is_outer(use: Use) -> bool:
    kind = type(use.layer)
    return use.part == "weight" and (kind is nn.Linear or (kind in _CONVS and getattr(use.layer, "groups", 1) == 1))


def _outer_squares(uses: Sequence[Use], shape: torch.Size) -> Tensor:
    """Positions of all uses add up before the square."""
    rows, columns = shape[0], math.prod(shape[1:])
    count, positions = len(uses[0].grads), sum(use.grads[0].numel() for use in uses) // rows
    held = positions * columns + (rows * columns if positions > _PAIRED_POSITIONS else 0)
    step = max(1, _HELD_ELEMENTS // held)
    total = uses[0].grads.new_zeros(rows, columns)
    for start in range(0, count, step):
        factors = [_factors(use.cut(start, start + step)) for use in uses]
        g, a = (torch.cat(part, 1) if len(uses) > 1 else part[0] for part in zip(*factors, strict=True))
        if len(g) == 1:
            gradient = g[0].T @ a[0]
            total.addcmul_(gradient, gradient)
        elif positions <= _PAIRED_POSITIONS:
            _add_pairs(total, g, a)
        else:
            total += torch.bmm(g.transpose(1, 2), a).square_().sum(0)
    return total.view(shape)


def _add_pairs(total: Tensor, g: Tensor, a: Tensor) -> None:
    """Add ``sum_n (sum_t g_nt a_nt^T)^2`` as matrix products over samples, without a gradient per sample."""
    for t in range(g.shape[1]):
        for u in range(t, g.shape[1]):
            total.addmm_((g[:, t] * g[:, u]).T, a[:, t] * a[:, u], alpha=1.0 if t == u else 2.0)
    if g.shape[1] > 1:
        total.clamp_(min=0.0)  # where positions cancel, rounding may leave less than nothing


def _factors(use: Use) -> tuple[Tensor, Tensor]:
    """``(g, a)`` of shapes ``(N, T, rows)`` and ``(N, T, columns)``: the gradient is the sum over T of g a^T."""
    if type(use.layer) is nn.Linear:
        return use.grads.reshape(len(use.grads), -1, use.grads.shape[-1]), use.inputs.reshape(
            len(use.inputs), -1, use.inputs.shape[-1]
        )
    return use.grads.flatten(2).transpose(1, 2), _unfolded(use).transpose(1, 2)


def _unfolded(use: Use) -> Tensor:
    """The patches that a convolution sees, shape ``(N, channels * kernel, positions)``."""
    layer, inputs = use.layer, use.inputs
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    sides = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    inputs = F.pad(inputs, sides, mode=mode) if any(sides) else inputs
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if isinstance(layer, nn.Conv1d):
        inputs, kernel, stride, dilation = inputs.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
    if math.prod(kernel) == 1:
        return inputs[:, :, :: stride[0], :: stride[1]].flatten(2)
    return F.unfold(inputs, kernel, dilation=dilation, stride=stride)


# -- embeddings ------------------------------------------------------------------------------------------------------


def _row_squares(uses: Sequence[Use], shape: torch.Size) -> Tensor:
    """Positions of one sample that name the same row add up before the square."""
    rows, width = shape
    owners, grads = [], []
    for use in uses:
        ids, g = use.inputs.flatten(1), use.grads.reshape(len(use.grads), -1, width)
        samples = torch.arange(len(ids), device=ids.device)[:, None]
        known = ids != (-1 if use.layer.padding_idx is None else use.layer.padding_idx)
        owners.append((samples * rows + ids)[known])
        grads.append(g[known])
    keys, places = torch.unique(torch.cat(owners), return_inverse=True)
    sums = grads[0].new_zeros(len(keys), width).index_add_(0, places, torch.cat(grads))
    return grads[0].new_zeros(shape).index_add_(0, keys % rows, sums.square_())


# -- everything else: one gradient per sample --------------------------------------------------------------------------


def _gradients(use: Use, shape: torch.Size) -> Tensor:
    """Gradient of every sample, shape ``(N, *shape)``."""
    count, kind = len(use.grads), type(use.layer)
    if kind in _NORMS:
        products = use.grads * _normalised(use) if use.part == "weight" else use.grads
        if kind in (nn.LayerNorm, nn.RMSNorm):
            return products.reshape(count, -1, *shape).sum(1)
        return products.reshape(count, *shape, -1).sum(-1)
    if use.part == "bias" and kind is nn.Linear:
        return use.grads.reshape(count, -1, *shape).sum(1)
    if use.part == "bias" and kind in _CONVS:
        return use.grads.flatten(2).sum(2)
    if use.part == "weight" and kind in _CONVS:
        groups: int = use.layer.groups  # type: ignore[assignment]
        g = use.grads.reshape(count * groups, shape[0] // groups, -1)
        a = _unfolded(use).reshape(count * groups, math.prod(shape[1:]), -1)
        return torch.bmm(g, a.transpose(1, 2)).reshape(count, *shape)
    return _by_vmap(use)


def _normalised(use: Use) -> Tensor:
    layer, x = use.layer, use.inputs
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)  # type: ignore[arg-type]


def _by_vmap(use: Use) -> Tensor:
    """For a layer of any other kind: its own backward pass, sample by sample in one call."""
    own = {name: _wide(weight.detach()) for name, weight in use.layer.named_parameters()}

    def pull(inputs: Tensor, grad: Tensor) -> Tensor:
        forward = lambda w: torch.func.functional_call(use.layer, {**own, use.part: w}, (inputs[None],))  # noqa: E731
        backward = torch.func.vjp(forward, own[use.part])[1]
        gradient: Tensor = backward(grad[None])[0]
        return gradient

    gradients: Tensor = torch.func.vmap(pull)(use.inputs, use.grads)
    return gradients
