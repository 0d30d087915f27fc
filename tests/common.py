"""What several tests need: devices, exact comparison, inputs that provoke."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

DATA = pathlib.Path(__file__).parent / "data"

#: Parameters of a `device` argument; the second one runs on a GPU machine only.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

#: Marks a test that needs a second GPU beside the first.
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def short(value: object) -> str:
    """A test id: `bfloat16` for torch.bfloat16, `64x32` for a shape."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return "x".join(str(item) for item in value) or "scalar"
    return str(value)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, last axis widened by the element size."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dim() == 0 or tensor.numel() == 0:
        tensor = tensor.reshape(-1).clone()
    return tensor.view(torch.uint8).numpy()


def assert_bitwise_equal(got: torch.Tensor, want: torch.Tensor, what: str = "tensor") -> None:
    """Same dtype, shape and bytes; else names the first element that differs, with both values."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, wanted {want.dtype}"
    assert tuple(got.shape) == tuple(want.shape), f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    different = raw(got) != raw(want)
    if different.any():
        width = 1 if got.dim() == 0 else got.element_size()
        index = tuple(int(i) for i in np.argwhere(different)[0])
        index = (*index[:-1], index[-1] // width)
        flat_got, flat_want = got.detach().cpu(), want.detach().cpu()
        at = index if got.dim() else ()
        raise AssertionError(
            f"{what}: {int(different.sum())} bytes differ, first at {at}: got {flat_got[at].item()!r},"
            f" wanted {flat_want[at].item()!r}"
        )


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor that is allocated uninitialised holds NaN (floating) or the largest value (integers)."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


#: (M, K): square, odd, single rows and columns, tile edges and tails of vector loops.
SHAPES = [(128, 256), (1, 1), (1, 7), (3, 5), (17, 1), (63, 65), (64, 64), (65, 129), (128, 127), (5, 1000), (257, 96)]


def provoking(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """An input on the CPU: `normal`, `wide`, `zeros`, `subnormal`, `huge`, `inf`, `nan`, `negative_zero`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    info = torch.finfo(dtype)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    elif kind == "zeros":
        x = torch.zeros(shape)
    elif kind == "negative_zero":
        x = torch.where(x > 0, x, -0.0)
    elif kind == "subnormal":
        x = x * info.tiny / 4
    elif kind == "huge":
        x = (x / 4).clamp(-0.99, 0.99).double().mul(info.max).float()
    elif kind in ("inf", "nan"):
        flat = x.reshape(-1)
        flat[:: max(1, flat.numel() // 3)] = float(kind)
        flat[-1:] = -float(kind)
    elif kind != "normal":
        raise ValueError(kind)
    return x.to(dtype)


KINDS = ["normal", "wide", "zeros", "negative_zero", "subnormal", "huge", "inf", "nan"]
