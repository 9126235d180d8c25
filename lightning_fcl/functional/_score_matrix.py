"""Checks of score matrices."""

from torch import Tensor


def square(matrix: Tensor) -> Tensor:
    """``matrix`` in float64 if it has one evaluation set per task, else an error."""
    table = score_matrix(matrix)
    if len(table) != table.shape[1]:
        raise ValueError(
            f"`matrix` must be square, one evaluation set per task, got shape {tuple(matrix.shape)}. "
            "Select the columns of the tasks in the order of training."
        )
    return table


def score_matrix(matrix: Tensor) -> Tensor:
    """``matrix`` in float64 if it is one of scores, else an error."""
    if matrix.dim() != 2 or not matrix.numel() or not matrix.is_floating_point():
        raise ValueError(f"`matrix` must be a float matrix, got {matrix.dtype} of shape {tuple(matrix.shape)}.")
    return matrix.detach().double()
