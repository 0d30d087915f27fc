"""Scale factors of one byte in the order in which the tensor cores of block-scaled GEMMs read them.

The layout is cuBLAS's for block scaling factors of one byte: a matrix of scales is cut into pieces of 128 rows by
4 columns, 512 consecutive bytes each; with ``T`` pieces in a row of pieces, entry ``(i, j)`` lies at
``((i // 128) * T + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows and columns of a piece, and how many of its rows lie side by side.
ROWS, COLUMNS = 128, 4
_BANDS = 4


def swizzle(scales: Tensor) -> Tensor:
    """The entries of ``scales`` in the GEMM's order.

    Args:
        scales: ``(rows, columns)``, multiples of 128 and 4, of any dtype and strides; its columns run along the
            contracted dimension, so that columnwise scales come as ``scales.t()``.

    Returns:
        a contiguous tensor of the same shape, which is nominal: the bytes lie as the GEMM reads them.
    """
    rows, columns = scales.shape
    at = torch.arange(rows * columns, device=scales.device)
    piece, within = at // (ROWS * COLUMNS), at % (ROWS * COLUMNS)
    across, side_by_side = max(columns // COLUMNS, 1), _BANDS * COLUMNS
    row = piece // across * ROWS + within % side_by_side // COLUMNS * (ROWS // _BANDS) + within // side_by_side
    return scales[row, piece % across * COLUMNS + at % COLUMNS].reshape(rows, columns)


def unswizzle(scales: Tensor) -> Tensor:
    """The inverse of :func:`swizzle`."""
    rows, columns = scales.shape
    row, column = torch.arange(rows, device=scales.device), torch.arange(columns, device=scales.device)
    return scales.reshape(-1)[place(row[:, None], column, columns)]


def place(row: Tensor, column: Tensor, columns: int) -> Tensor:
    """Where entry ``(row, column)`` of a swizzled matrix of ``columns`` (a multiple of 4) lies among all its bytes.

    Reading by it, like the gather of :func:`swizzle`, traces with any sizes; torch would guard a reshape into pieces
    on how many there are.
    """
    piece = row // ROWS * (columns // COLUMNS) + column // COLUMNS
    band = ROWS // _BANDS
    return (piece * band + row % band) * (_BANDS * COLUMNS) + row % ROWS // band * COLUMNS + column % COLUMNS
