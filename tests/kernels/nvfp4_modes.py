"""What the tests of NVFP4's ops share: the modes by name, calls, and the oracle."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import sys
import types
from dataclasses import dataclass, replace

import pytest
import torch

from tejit import backend
from tejit.format_info import NVFP4_SIGN_MASK
from tejit.kernels import nvfp4
from tests.common import assert_bitwise_equal, poisoned_memory

NAMES = ("row", "row_scale_inv", "col", "col_scale_inv", "amax_row", "amax_col")


@dataclass(frozen=True)
class Mode:
    """The arguments of `nvfp4_quantize` between the directions and the tensors."""

    rht: bool = False
    sign_mask: int = NVFP4_SIGN_MASK
    square: bool = False
    row_scaled: bool = False
    four_over_six: int = 0
    e4m3_max: int = 448
    swizzled: bool = False
    seed: tuple[int, int] | None = None

    def arguments(self, device: str | torch.device) -> tuple[object, ...]:
        seed = None if self.seed is None else torch.tensor(self.seed, device=device)
        return (
            self.rht,
            self.sign_mask,
            self.square,
            self.row_scaled,
            self.four_over_six,
            self.e4m3_max,
            self.swizzled,
            seed,
        )


MODES = {
    "1x16": Mode(),
    "16x16": Mode(square=True),
    "rht": Mode(rht=True),
    "rht without signs": Mode(rht=True, sign_mask=0),
    "row-scaled": Mode(row_scaled=True),
    "4over6 mae": Mode(four_over_six=1),
    "4over6 mse 256": Mode(four_over_six=2, e4m3_max=256),
    "4over6 mae 16x16 256": Mode(four_over_six=1, square=True, e4m3_max=256),
    "4over6 mse 16x16": Mode(four_over_six=2, square=True),
    "4over6 mae row-scaled 256": Mode(four_over_six=1, row_scaled=True, e4m3_max=256),
    "sr": Mode(seed=(-(2**62) - 12345, 2**40 + 7)),
    "sr 16x16": Mode(square=True, seed=(1, 2)),
    "sr rht": Mode(rht=True, seed=(2**63 - 1, -1)),
    "rht 16x16": Mode(rht=True, square=True),
    "1x16 swizzled 256": Mode(swizzled=True, e4m3_max=256),
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def quantize(how: str, x: torch.Tensor, mode: Mode, row: bool = True, col: bool = True, given=(None, None)):
    with poisoned_memory(), backend(how):
        return nvfp4.quantize(x, row, col, *mode.arguments(x.device), *given)


def agree(x: torch.Tensor, mode: Mode, row: bool = True, col: bool = True, given=(None, None)) -> None:
    """The kernels on x's device give the bytes of the reference on the CPU."""
    got = quantize("kernels", x, mode, row, col, given)
    want = quantize("torch", x.cpu(), mode, row, col, [None if a is None else a.cpu() for a in given])
    for name, one, other in zip(NAMES, got, want, strict=True):
        assert_bitwise_equal(one.cpu(), other, name)


def without(mode: Mode, **changes: object) -> Mode:
    return replace(mode, **changes)


def transformer_engine_reference():
    """The class `NVFP4QuantizerRef` of an installed transformer-engine; skips the test where there is none.

    Its module is pure torch, but the packages above it want a GPU and its libraries: those are stood in for, and
    nothing of them stays behind in `sys.modules`.
    """
    try:
        installed = importlib.metadata.distribution("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the oracle is not installed: pip install --no-deps transformer-engine==2.20.2")
    folder = pathlib.Path(str(installed.locate_file("transformer_engine/pytorch/custom_recipes")))
    prefix = "transformer_engine.pytorch"

    class Base:
        def __init__(self, rowwise: bool = True, columnwise: bool = True) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    stubs = {
        name: types.ModuleType(name)
        for name in (
            "transformer_engine",
            prefix,
            f"{prefix}.custom_recipes",
            f"{prefix}.custom_recipes.gemm",
            f"{prefix}.quantized_tensor",
        )
    }
    for name in ("transformer_engine", prefix, f"{prefix}.custom_recipes"):
        stubs[name].__path__ = []
    gemm = stubs[f"{prefix}.custom_recipes.gemm"]
    gemm.MMParams, gemm.GEMMType = object, types.SimpleNamespace(FPROP="fprop", WGRAD="wgrad")
    stubs[f"{prefix}.custom_recipes"].gemm = gemm
    stubs[f"{prefix}.quantized_tensor"].QuantizedTensorStorage = object
    stubs[f"{prefix}.quantized_tensor"].Quantizer = Base
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"}
    sys.modules.update(stubs)
    try:
        for name in ("reference_utils", "reference_nvfp4"):
            full = f"{prefix}.custom_recipes.{name}"
            spec = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[full] = module
            spec.loader.exec_module(module)
            setattr(stubs[f"{prefix}.custom_recipes"], name, module)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules.update(before)
    return module
