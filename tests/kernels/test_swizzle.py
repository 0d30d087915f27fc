"""Scale factors in the GEMM's order: against torchao, and by the formula."""

import pytest
import torch

from tejit.kernels.swizzle import swizzle, unswizzle

SHAPES = [(128, 4), (128, 8), (256, 4), (384, 20)]


def numbered(shape: tuple[int, int]) -> torch.Tensor:
    return torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_torchao(shape) -> None:
    """Oracle: torchao's `to_blocked`, which it hands to cuBLAS."""
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = numbered(shape)
    assert torch.equal(swizzle(scales).flatten(), utils.to_blocked(scales))


@pytest.mark.parametrize("shape", SHAPES)
def test_by_the_formula_entry_for_entry(shape) -> None:
    scales, flat = numbered(shape), swizzle(numbered(shape)).flatten()
    pieces = shape[1] // 4
    for i in range(shape[0]):
        for j in range(shape[1]):
            at = ((i // 128) * pieces + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
            assert flat[at] == scales[i, j]


@pytest.mark.parametrize("shape", SHAPES)
def test_unswizzle_is_the_inverse_and_strides_do_not_matter(shape) -> None:
    scales = numbered(shape)
    assert torch.equal(unswizzle(swizzle(scales)), scales)
    assert torch.equal(swizzle(unswizzle(scales)), scales)
    assert torch.equal(swizzle(scales.t().contiguous().t()), swizzle(scales))
    assert swizzle(scales.t().contiguous().t()).is_contiguous()


def test_both_trace_and_compile() -> None:
    scales = torch.randint(0, 255, (256, 12), dtype=torch.uint8)
    compiled = torch.compile(lambda s: (swizzle(s), unswizzle(s)), fullgraph=True)
    for one, other in zip(compiled(scales), (swizzle(scales), unswizzle(scales)), strict=True):
        assert torch.equal(one, other)
