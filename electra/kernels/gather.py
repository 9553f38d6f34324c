"""Some rows of a matrix, and the way back of their gradients: a last layer need not finish what nobody reads."""

import torch
from torch import Tensor


def chosen(matrix: Tensor, at: Tensor | None) -> Tensor:
    """The rows `at` [M] of `matrix` [N, D]; all of them without."""
    return matrix if at is None else matrix.index_select(0, at)


def put_back(rows: Tensor, at: Tensor | None, N: int) -> Tensor:
    """The gradient [N, D] of a matrix from that of its chosen `rows` [M, D]: nothing where none was chosen."""
    return rows if at is None else rows.new_zeros(N, rows.shape[1]).index_add_(0, at, rows)


def flat_places(at: Tensor | None, hidden: Tensor) -> Tensor | None:
    """Positions `at` [B, M] in rows of `hidden` [B, L, D] as rows of it flattened: [B · M]."""
    if at is None:
        return None
    B, L = hidden.shape[:2]
    return (at + torch.arange(0, B * L, L, device=at.device)[:, None]).flatten()
