"""Diagonal Fisher information: squared gradients of single samples, averaged over all samples."""

from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fcl.functional._per_sample import chunks, undisturbed
from lightning_fcl.functional._squares import METHODS, Squares
from lightning_fcl.functional.likelihood import LogLikelihood


def fisher_diagonal(
    module: nn.Module,
    log_likelihood: LogLikelihood,
    batches: Iterable[Any],
    *,
    params: Collection[str] | None = None,
    num_samples: int | None = None,
    chunk_size: int | None = None,
    method: Literal["auto", "closed_form", "vmap", "loop"] = "auto",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    r"""How much every weight matters for the data: the diagonal of the empirical Fisher information.

    .. math:: F_i = \frac{1}{N} \sum_{n=1}^{N} \left( \frac{\partial \log p(y_n | x_n)}{\partial \theta_i} \right)^2

    Gradients are squared per sample, so the result does not depend on the batch size. The module runs in eval mode on
    copies of its buffers; its modes, buffers, ``.grad`` and torch's random state are afterwards as they were before.

    Args:
        module: The model at the end of a task.
        log_likelihood: Gets ``(module, batch)``, returns shape ``(B,)``, the log-likelihood of each sample in nats;
            no other sample may change it. It is called with one sample, as a batch of size 1, or with several.
        batches: Any containers of tensors that share their first dimension, e.g. a DataLoader. Scalars and values that
            are no tensors are passed on whole. Tensors are moved to the module's device.
        params: Names to include; by default all parameters that require a gradient.
        num_samples: Stop after so many samples; by default all are used.
        chunk_size: Samples in one pass. By default the batch, at most 64, with the closed form; as many as fit 2**23
            elements of gradients, from 1 to 32, with ``"vmap"``, whose memory is ``chunk_size`` times the parameters.
        method: ``"closed_form"``: one forward and one backward pass for all samples, from which the squares of linear,
            convolution, embedding and norm layers follow; any other layer that maps one tensor to one is run by vmap,
            alone. ``"vmap"``: all at once by ``torch.func``. ``"loop"``: one backward pass per sample; always works.
            ``"auto"``: for parameters whose layers allow it the closed form, provided that what it sees of the first
            sample, alone and in its batch, is that sample's gradient; vmap for the others; and the loop, with a
            warning, if vmap cannot run the module.
        dtype: Of the result. Sums run in float64.

    Returns:
        One tensor per name, shaped like the parameter: the mean over samples, in nats squared per unit squared.

    Raises:
        ValueError: If the log-likelihood has another shape, does not depend on the parameters or has gradients that are
            not finite; if a batch's tensors disagree on its size; if there is no sample; or if an argument is out of
            range.
        RuntimeError: If ``method`` names one that cannot measure this module, with the reason.

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
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(map(repr, METHODS))}, got {method!r}.")
    device = next(iter(weights.values())).device
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    seen = 0
    with undisturbed(module, device):
        squares = Squares(module, log_likelihood, weights, method, chunk_size)
        for count, chunk in chunks(batches, squares.chunk_size, num_samples, device):
            for name, square in squares(count, chunk).items():
                sums[name] += square
            seen += count
    if not seen:
        raise ValueError("`batches` must hold at least one sample, got none. Was the iterator used up before?")
    return {name: _finite(name, value.div_(seen)).to(dtype) for name, value in sums.items()}


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
