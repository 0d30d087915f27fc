"""The op library: torch's own opcheck on every op, for every quantizer of the table."""

import pytest
import torch
from torch.library import opcheck

from tejit.nn import asked
from tests.common import DEVICES
from tests.dynamo.samples import QUANTIZERS, kernel_ops, quantizer_ops


def check(name: str, values: tuple) -> None:
    op = getattr(torch.ops.tejit, name).default
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not name.endswith("make_empty"):  # uninitialised outputs cannot be compared
        utils.append("test_aot_dispatch_dynamic")
    opcheck(op, values, test_utils=utils)
    assert torch.Tag.pt2_compliant_tag in op.tags


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(kernel_ops("cpu"))), ids=[name for name, _ in kernel_ops("cpu")])
def test_opcheck(index, device, need_kernels) -> None:
    need_kernels(device)
    check(*kernel_ops(device)[index])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usage", ["both", "rowwise", "columnwise"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_opcheck_of_ops_that_take_a_quantizer(name, usage, device, need_kernels) -> None:
    need_kernels(device)
    quantizer = QUANTIZERS[name].with_usage(rowwise=usage != "columnwise", columnwise=usage != "rowwise")
    for op, values in quantizer_ops(device, quantizer):
        check(op, values)


#: They answer by the backward that runs, not by their arguments: tests/nn/test_second_derivatives.py and
#: test_asked_gradients.py.
OF_BACKWARD = {"first_derivative_only", "main_grad_is_asked"}


def test_every_op_is_checked_here() -> None:
    assert asked, "the module that defines the ops of backward is loaded"
    checked = {name for name, _ in (*kernel_ops("cpu"), *quantizer_ops("cpu", QUANTIZERS["current"]))}
    registered = {
        schema.name.removeprefix("tejit::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("tejit::")
    }
    assert registered == checked | OF_BACKWARD
