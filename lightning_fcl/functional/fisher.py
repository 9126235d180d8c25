"""Diagonal Fisher information: squared gradients of single samples, averaged over all samples."""

import warnings
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_fcl.functional._per_sample import PerSample, chunks, is_batched, undisturbed
from lightning_fcl.functional.likelihood import LogLikelihood

_MAX_CHUNK = 32
_CHUNK_ELEMENTS = 2**23  # of per-sample gradients held at once: 32 MB in float32


def fisher_diagonal(
    module: nn.Module,
    log_likelihood: LogLikelihood,
    batches: Iterable[Any],
    *,
    params: Collection[str] | None = None,
    num_samples: int | None = None,
    chunk_size: int | None = None,
    method: Literal["auto", "vmap", "loop"] = "auto",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    r"""How much every weight matters for the data: the diagonal of the empirical Fisher information.

    .. math:: F_i = \frac{1}{N} \sum_{n=1}^{N} \left( \frac{\partial \log p(y_n | x_n)}{\partial \theta_i} \right)^2

    Gradients are squared per sample, so the result does not depend on the batch size. The module runs in eval mode on
    copies of its buffers; its modes, buffers, ``.grad`` and torch's random state are afterwards as they were before.

    Args:
        module: The model at the end of a task.
        log_likelihood: Gets ``(module, batch)``, returns shape ``(B,)``, the log-likelihood of each sample in nats. It
            is called with one sample at a time, whose leading dimension of size 1 is kept.
        batches: Any containers of tensors that share their first dimension, e.g. a DataLoader. Scalars and values that
            are no tensors are passed on whole. Tensors are moved to the module's device.
        params: Names to include; by default all parameters that require a gradient.
        num_samples: Stop after so many samples; by default all are used.
        chunk_size: Samples whose gradients are held at once with ``"vmap"``; memory is ``chunk_size`` times the
            parameters. By default as many as fit 2**23 elements, from 1 to 32.
        method: ``"vmap"`` (fast for small parameter trees), ``"loop"`` (one backward pass per sample, always works), or
            ``"auto"``: vmap for chunks of two samples or more, and the loop, with a warning, if vmap cannot run the
            module.
        dtype: Of the result. Sums run in float64.

    Returns:
        One tensor per name, shaped like the parameter: the mean over samples, in nats squared per unit squared.

    Raises:
        ValueError: If the log-likelihood has another shape, does not depend on the parameters or has gradients that are
            not finite; if a batch's tensors disagree on its size; if there is no sample; or if an argument is out of
            range.
        RuntimeError: With ``method="vmap"``, if vmap cannot run the module.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> line = lambda module, x: module(x)[:, 0]  # its gradient is x: +1 and -1, of mean 0
        >>> fisher_diagonal(layer, line, [torch.tensor([[1.0], [-1.0]])])
        {'weight': tensor([[1.]])}

    Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017
    (https://arxiv.org/abs/1612.00796); empirical form with the data's labels as in Kunstner et al., "Limitations of the
    empirical Fisher approximation", NeurIPS 2019, eq. 3 (https://arxiv.org/abs/1905.12558).

    Deviation: labels come from the data unless ``log_likelihood`` draws its own.
    """
    weights = _select(module, params)
    _check_positive(num_samples=num_samples, chunk_size=chunk_size)
    if method not in ("auto", "vmap", "loop"):
        raise ValueError(f'`method` must be "auto", "vmap" or "loop", got {method!r}.')
    fitting = _CHUNK_ELEMENTS // max(1, sum(weight.numel() for weight in weights.values()))
    size = chunk_size or min(max(fitting, 1), _MAX_CHUNK)
    vectorised = method == "vmap" or (method == "auto" and size > 1)
    device = next(iter(weights.values())).device
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    seen = 0
    with undisturbed(module, device):
        call = PerSample(module, log_likelihood)
        for count, chunk in chunks(batches, size, num_samples, device):
            squares = _try_vmap(call, weights, chunk, fall_back=method == "auto") if vectorised else None
            vectorised = squares is not None
            for name, square in (squares or _loop(call, weights, count, chunk)).items():
                sums[name] += square
            seen += count
    if not seen:
        raise ValueError("`batches` must hold at least one sample, got none. Was the iterator used up before?")
    return {name: _finite(name, value.div_(seen)).to(dtype) for name, value in sums.items()}


def _loop(call: PerSample, weights: dict[str, Tensor], count: int, chunk: Any) -> dict[str, Tensor]:
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    for i in range(count):
        sample = tree_map(lambda leaf, i=i: leaf[i] if is_batched(leaf) else leaf, chunk)
        value = call.value(leaves, call.copies, sample)
        grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        for square, grad in zip(squares.values(), grads, strict=True):
            square += grad.double().square()
    return squares


def _try_vmap(call: PerSample, weights: dict[str, Tensor], chunk: Any, *, fall_back: bool) -> dict[str, Tensor] | None:
    """Sums of squares of one chunk, or ``None`` and a warning if vmap cannot run the module."""
    in_dims = (None, None, tree_map(lambda leaf: 0 if is_batched(leaf) else None, chunk))
    gradients = torch.func.vmap(torch.func.grad(call.value), in_dims=in_dims, randomness="different")
    try:
        grads = gradients({name: weight.detach() for name, weight in weights.items()}, call.copies, chunk)
    except RuntimeError as error:
        if not fall_back:
            raise
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"fisher_diagonal runs sample by sample, since vmap failed: {reason}", stacklevel=3)
        return None
    return {
        name: grad.to(torch.promote_types(grad.dtype, torch.float32)).square().sum(0, dtype=torch.float64)
        for name, grad in grads.items()
    }


def _select(module: nn.Module, names: Collection[str] | None) -> dict[str, Tensor]:
    own = dict(module.named_parameters())
    if unknown := sorted(set(names or ()) - own.keys()):
        raise ValueError(f"`params` must name parameters of `module`, got {unknown[:3]}. It has e.g. {list(own)[:3]}.")
    chosen: dict[str, Tensor] = {
        name: p for name, p in own.items() if (p.requires_grad if names is None else name in names)
    }
    if not chosen:
        raise ValueError("`module` must have a parameter to measure, got none. Are all frozen? Name them in `params`.")
    return chosen


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}. Leave it out for the default.")


def _finite(name: str, value: Tensor) -> Tensor:
    if not torch.isfinite(value).all():
        raise ValueError(f"`log_likelihood` must have finite gradients, got NaN or infinity for {name!r}.")
    return value
