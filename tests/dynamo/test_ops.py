"""The op library: torch's own opcheck on every op, fakes equal to what the ops return."""

import pytest
import torch
from torch.library import opcheck

from tests.common import DEVICES


def arguments(device: str) -> list[tuple[str, tuple]]:
    x = torch.randn(6, 10, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, device=device)
    out = [torch.zeros(size, dtype=torch.uint8, device=device) for size in ((6, 10), (10, 6))]
    scales = [torch.zeros(size, device=device) for size in ((1, 8), (1, 12))]
    blocks = torch.randn(64, 96, dtype=torch.bfloat16, device=device)
    mx = [torch.zeros(size, dtype=torch.uint8, device=device) for size in ((64, 96), (128, 4), (64, 96), (4, 128))]
    return [
        ("fp8_amax", (x,)),
        ("fp8_scale", (one, 0, True, 0.5)),
        ("fp8_quantize_current", (x, 0, True, True, False, 0.0, None)),
        ("fp8_quantize_current", (x, 1, True, False, True, 0.1, one)),
        ("fp8_quantize_current", (x[:0], 1, False, True, False, 0.0, None)),
        ("fp8_quantize_current_out", (x, 0, False, 0.0, None, None, *out, one.clone())),
        ("fp8_quantize_current_out", (x, 1, True, 0.0, one, one * 0, None, out[1], one.clone())),
        ("fp8_quantize_delayed", (x, 0, True, True, one, one * 0)),
        ("fp8_quantize_delayed", (x[:0], 1, True, False, one, one * 0)),
        ("fp8_quantize_delayed_out", (x, 1, one, one * 0, None, None, out[1], one.clone())),
        ("fp8_quantize_delayed_out", (x, 0, one, one * 0, one * 0, *out, one.clone())),
        ("fp8_make_empty", ([6, 10], True, True, torch.device(device), False)),
        ("fp8_make_empty", ([], True, False, torch.device(device), False)),
        ("fp8_block_quantize", (x, 0, 1, True, True, False, 0.0)),
        ("fp8_block_quantize", (x, 1, 2, True, False, True, 0.1)),
        ("fp8_block_quantize", (x[:0], 1, 1, False, True, False, 0.0)),
        ("fp8_block_quantize_out", (x, 0, 1, False, 0.0, one * 0, out[0], scales[0], out[1], scales[1])),
        ("fp8_block_quantize_out", (x, 1, 1, True, 0.0, None, None, None, out[1], scales[1])),
        ("fp8_block_make_empty", ([6, 10], 1, True, True, torch.device(device), False)),
        ("fp8_block_make_empty", ([], 2, True, False, torch.device(device), False)),
        ("mxfp8_quantize", (blocks, 0, True, True, False, False)),
        ("mxfp8_quantize", (blocks[:5], 1, True, False, False, True)),
        ("mxfp8_quantize", (blocks[:, :0], 1, False, True, True, False)),
        ("mxfp8_quantize_out", (blocks, 0, True, True, one * 0, *mx)),
        ("mxfp8_quantize_out", (blocks, 1, False, False, None, None, None, *mx[2:])),
        ("mxfp8_make_empty", ([64, 96], True, True, torch.device(device), False)),
        ("mxfp8_make_empty", ([32], True, False, torch.device(device), False)),
    ]


def nvfp4_arguments(device: str) -> list[tuple[str, tuple]]:
    x = torch.randn(32, 48, dtype=torch.bfloat16, device=device)
    seed, one = torch.tensor([3, 4], device=device), torch.ones(1, device=device)
    shapes = ((32, 24), (128, 4), (48, 16), (128, 4))
    row, row_scales, col, col_scales = (torch.zeros(size, dtype=torch.uint8, device=device) for size in shapes)
    plain = (False, 0xD7E8, False, False, 0, 448, False)
    rotated, tiles, lines, better = (
        (True, 0, False, False, 0, 448, True),
        (False, 0, True, False, 0, 256, False),
        (False, 0, False, True, 0, 448, False),
        (False, 0, True, False, 2, 256, False),
    )
    return [
        ("nvfp4_quantize", (x, True, True, *plain, None, None, None)),
        ("nvfp4_quantize", (x, True, True, *rotated, seed, None, one)),
        ("nvfp4_quantize", (x, True, False, *tiles, None, one, None)),
        ("nvfp4_quantize", (x[:5], True, False, *lines, None, None, None)),
        ("nvfp4_quantize", (x[:, :0], False, True, *better, None, None, None)),
        ("nvfp4_quantize_out", (x, *plain, seed, None, None, one * 0, row, row_scales, None, None, one.clone(), None)),
        ("nvfp4_quantize_out", (x, *tiles, None, one, one, None, row, row_scales, col, col_scales, one * 2, one * 3)),
        ("nvfp4_amax", (x, True, True, True, 0xD7E8, False)),
        ("nvfp4_amax", (x[:5], True, False, False, 0, True)),
        ("nvfp4_make_empty", ([32, 48], True, True, True, torch.device(device), False)),
        ("nvfp4_make_empty", ([16], True, False, False, torch.device(device), False)),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(11))
def test_opcheck_nvfp4(index, device, need_kernels) -> None:
    need_kernels(device)
    check(*nvfp4_arguments(device)[index])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(arguments("cpu"))))
def test_opcheck(index, device, need_kernels) -> None:
    need_kernels(device)
    check(*arguments(device)[index])


def check(name: str, values: tuple) -> None:
    op = getattr(torch.ops.tejit, name).default
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not name.endswith("make_empty"):  # uninitialised outputs cannot be compared
        utils.append("test_aot_dispatch_dynamic")
    opcheck(op, values, test_utils=utils)
    assert torch.Tag.pt2_compliant_tag in op.tags


def test_every_op_is_checked_here() -> None:
    checked = {name for name, _ in [*arguments("cpu"), *nvfp4_arguments("cpu")]}
    registered = {
        schema.name.removeprefix("tejit::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("tejit::")
    }
    assert registered == checked
