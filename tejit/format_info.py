"""Facts of the formats: every maximum, block size and scale type of the package is read from here."""

import math
from typing import NamedTuple

import torch


class ElementInfo(NamedTuple):
    """A low-precision element type.

    Attributes:
        name: the field's name for it.
        code: the number ops use for it (schemas of hot ops take plain ints).
        dtype: torch's dtype of the same bits.
        max: the largest finite value; casts saturate to it.
        nan_byte: the byte written for a NaN, whatever its sign; None where the element type has no NaN.
    """

    name: str
    code: int
    dtype: torch.dtype
    max: float
    nan_byte: int | None


class FormatInfo(NamedTuple):
    """A quantization format: its elements and how they are scaled.

    Attributes:
        name: the name shown to people.
        elements: element types it may hold.
        block: elements of a row that share a scale; None means the whole tensor does.
        scale_dtype: dtype of the scale buffer.
        scale_alignment: the last dimension of a scale buffer is padded with zeros to a multiple of this.
        scale_row_alignment: and the first dimension to a multiple of this.
        alignment: K (rowwise) and M (columnwise) must be multiples of this.
    """

    name: str
    elements: tuple[ElementInfo, ...]
    block: int | None
    scale_dtype: torch.dtype
    alignment: int
    scale_alignment: int = 1
    scale_row_alignment: int = 1


E4M3 = ElementInfo("E4M3", code=0, dtype=torch.float8_e4m3fn, max=448.0, nan_byte=0x7F)
E5M2 = ElementInfo("E5M2", code=1, dtype=torch.float8_e5m2, max=57344.0, nan_byte=0x7F)

FP8_ELEMENTS: tuple[ElementInfo, ...] = (E4M3, E5M2)
FP8_TENSOR = FormatInfo("FP8", FP8_ELEMENTS, block=None, scale_dtype=torch.float32, alignment=1)
FP8_BLOCK = FormatInfo("FP8 blocks", FP8_ELEMENTS, block=128, scale_dtype=torch.float32, alignment=1, scale_alignment=4)

#: Powers of two in one byte: the exponent plus 127; 255 is NaN.
E8M0_BIAS = 127
E8M0_NAN = 0xFF
MXFP8 = FormatInfo(
    "MXFP8",
    FP8_ELEMENTS,
    block=32,
    scale_dtype=torch.uint8,
    alignment=32,
    scale_alignment=4,
    scale_row_alignment=128,
)

#: Two codes a byte, the element of the even index in the low half; bit 3 is the sign.
E2M1 = ElementInfo("E2M1", code=2, dtype=torch.float4_e2m1fn_x2, max=6.0, nan_byte=None)
#: The magnitudes of codes 0 to 7.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4 = FormatInfo(
    "NVFP4",
    (E2M1,),
    block=16,
    scale_dtype=torch.uint8,
    alignment=16,
    scale_alignment=4,
    scale_row_alignment=128,
)
#: Signs of the random Hadamard transform: bit i set where row i of a block of 16 changes its sign.
NVFP4_SIGN_MASK = 0xD7E8

#: What a GEMM on FP8 bytes needs of its dimensions (cuBLASLt: 16-byte rows), reached by padding in ``gemm``.
FP8_GEMM_ALIGNMENT = 16

FLT_MAX = torch.finfo(torch.float32).max

#: dtypes that every quantizer accepts as input and as nominal dtype.
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fp8_element(dtype: torch.dtype) -> ElementInfo:
    """The :class:`ElementInfo` of an FP8 dtype.

    Raises ``TypeError`` for every other dtype.
    """
    if dtype == E4M3.dtype:
        return E4M3
    if dtype == E5M2.dtype:
        return E5M2
    raise TypeError(f"fp8_dtype is {dtype!r}; it must be torch.float8_e4m3fn or torch.float8_e5m2 (a torch.dtype)")


def checked_alignment(format: FormatInfo, shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> None:
    """Whether a tensor of ``shape`` can be cut into the format's blocks, in the directions asked for.

    With ``M`` all leading dimensions together and ``K`` the last: rowwise data needs K, columnwise data M to be a
    multiple of ``format.alignment``.

    Raises ``ValueError`` naming the dimension, its size, the multiple and the next size that works.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1] if len(shape) else 1
    for wanted, name, which, size in (
        (rowwise, "K", "the last dimension", columns),
        (columnwise, "M", "all dimensions but the last together", rows),
    ):
        if wanted and size % format.alignment:
            good = -(-size // format.alignment) * format.alignment
            raise ValueError(
                f"{format.name} needs {name} ({which}) to be a multiple of {format.alignment}, but {name} = {size} in"
                f" shape {tuple(shape)}; pad it to {good}"
            )
