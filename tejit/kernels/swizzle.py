"""Scale factors of one byte in the order in which the tensor cores of block-scaled GEMMs read them.

The layout is cuBLAS's for block scaling factors of one byte: a matrix of scales is cut into pieces of 128 rows by
4 columns, 512 consecutive bytes each; with ``T`` pieces in a row of pieces, entry ``(i, j)`` lies at
``((i // 128) * T + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4``.
"""

from __future__ import annotations

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
    pieces = scales.reshape(rows // ROWS, _BANDS, ROWS // _BANDS, columns // COLUMNS, COLUMNS)
    return pieces.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzle(scales: Tensor) -> Tensor:
    """The inverse of :func:`swizzle`."""
    rows, columns = scales.shape
    pieces = scales.reshape(rows // ROWS, columns // COLUMNS, ROWS // _BANDS, _BANDS, COLUMNS)
    return pieces.permute(0, 3, 2, 1, 4).reshape(rows, columns)
