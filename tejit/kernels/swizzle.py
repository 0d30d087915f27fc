"""The order in which a block-scaled GEMM reads a matrix of one-byte scales.

Element (i, j) of a matrix with ``T`` groups of 4 columns lies at
``((i/128)*T + j/4)*512 + (i%32)*16 + ((i%128)/32)*4 + j%4`` (cuBLAS, "Block Scaling Factors Layout").
"""

from __future__ import annotations

from torch import Tensor

#: A tile of scales, 128 rows of 4: four groups of 32 rows side by side in 512 bytes.
_GROUPS, _ROWS, _COLUMNS = 4, 32, 4


def swizzle(scales: Tensor) -> Tensor:
    """``scales`` uint8 ``(rows, columns)``, multiples of 128 and 4, in the GEMM's order; the same shape."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // (_GROUPS * _ROWS), _GROUPS, _ROWS, columns // _COLUMNS, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzle(scales: Tensor) -> Tensor:
    """The inverse of :func:`swizzle`."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // (_GROUPS * _ROWS), columns // _COLUMNS, _ROWS, _GROUPS, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)
