"""How sharp the minimum is: the largest eigenvalues of the loss's Hessian, by SciPy's Lanczos over products."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fcl._imports import optional_import


def top_eigenvalues(
    module: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[tuple[Any, int]],
    k: int = 5,
    *,
    tolerance: float = 1e-3,
) -> list[float]:
    """Largest eigenvalues of the Hessian of the mean loss, in descending order.

    Args:
        module: In eval mode; its trainable parameters that the loss depends on are considered.
        loss_fn: Module and batch to the batch's mean loss, a scalar.
        batches: Batches with their number of examples.
        k: How many eigenvalues, below the number of parameters.
        tolerance: Relative accuracy.

    Returns:
        Eigenvalues. The first over the last is the anisotropy.

    Raises:
        MissingExtraError: If SciPy is not installed (extra ``analyse``).

    Source: Liu et al., "FedADB", ACM MM 2026, table 5; ARPACK's implicitly restarted Lanczos, through SciPy.
    """
    linalg: Any = optional_import("scipy.sparse.linalg", extra="analyse")
    import numpy as np

    params = _used(module, loss_fn, batches[0][0])
    sizes, total = [p.numel() for p in params], sum(count for _, count in batches)

    def product(vector: Any) -> Any:
        flat = torch.from_numpy(np.asarray(vector).ravel()).to(params[0])
        direction = [part.view_as(p) for part, p in zip(torch.split(flat, sizes), params, strict=True)]
        result = torch.zeros_like(flat)
        for batch, count in batches:
            gradients = torch.autograd.grad(loss_fn(module, batch), params, create_graph=True)
            along = torch.stack([(g * d).sum() for g, d in zip(gradients, direction, strict=True)]).sum()
            parts = torch.autograd.grad(along, params, materialize_grads=True)
            result += torch.cat([part.reshape(-1) for part in parts]) * (count / total)
        return result.double().cpu().numpy()

    operator = linalg.LinearOperator((sum(sizes), sum(sizes)), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(sum(sizes))
    values = linalg.eigsh(operator, k=k, which="LA", v0=start, tol=tolerance, return_eigenvectors=False)
    return sorted(map(float, values), reverse=True)


def _used(module: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> list[Tensor]:
    params = [p for p in module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss_fn(module, batch), params, allow_unused=True)
    return [p for p, gradient in zip(params, gradients, strict=True) if gradient is not None]
