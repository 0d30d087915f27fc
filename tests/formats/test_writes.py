"""Row 74: what is written to a quantized tensor or a view of one is there afterwards, or the write raises."""

import itertools
import pathlib
import subprocess
import sys
import warnings

import pytest
import torch

from tests.formats import writes
from tests.formats.registry import each_case

#: Operations that users know best: they are there on every release of torch, and were found.
KNOWN = [
    "add_.Tensor",
    "sub_.Tensor",
    "mul_.Tensor",
    "div_.Tensor",
    "copy_",
    "fill_.Scalar",
    "zero_",
    "neg_",
    "exp_",
    "sqrt_",
    "normal_",
    "uniform_",
    "masked_fill_.Scalar",
    "scatter_.src",
    "scatter_add_",
    "index_copy_",
    "index_add_",
    "index_fill_.int_Scalar",
    "clamp_max_.Tensor",
    "lerp_.Scalar",
    "addcmul_",
    "addcdiv_",
    "pow_.Scalar",
    "sigmoid_",
    "log_",
    "round_",
    "sign_",
    "add.out",
    "mul.out",
    "cat.out",
    "mm.out",
    "_foreach_add_.Scalar",
    "_foreach_mul_.Scalar",
    "_foreach_copy_",
    "_foreach_zero_",
    "bernoulli_.float",
]


def outcomes(case, triples) -> dict:
    found: dict[str, list[str]] = {"right": [], "raises": [], "silent": [], "-": []}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for usage, operation, view in triples:
            found[writes.outcome(case, usage, operation, view)].append(f"{operation.name} on {view.name} {usage}")
    return found


def test_74_the_generator_finds_the_operations_that_write() -> None:
    names = {operation.name for operation in writes.operations()}
    assert len(names) > 300
    assert names >= {name for name in KNOWN if name not in ("mm.out", "sqrt_", "scatter_.src")}


@each_case()
def test_74_no_write_is_lost(case) -> None:
    """Each operation on the whole tensor or on a view, in turn; `full` has all of them."""
    views, usages = writes.VIEWS[1:], case.usages()
    triples = []
    for index, operation in enumerate(writes.operations()):
        usage = usages[index % len(usages)]
        if (index + len(case.name)) % 8 == 0:
            triples.append((usage, operation, writes.VIEWS[0]))
        if (index + len(case.name)) % 4 == 0:
            triples.append((usage, operation, views[(index // 4) % len(views)]))
    found = outcomes(case, triples)
    assert found["silent"] == []
    assert len(found["right"]) > 25
    assert "identity" in case.name or len(found["raises"]) > 25


@pytest.mark.full
@each_case(usages=True)
@pytest.mark.parametrize("part", range(4))
def test_74_no_write_is_lost_through_any_view(case, usage, part) -> None:
    chosen = writes.operations()[part::4]
    found = outcomes(case, itertools.product([usage], chosen, writes.VIEWS))
    assert found["silent"] == []


@pytest.mark.full
def test_74_the_table_of_the_docs_is_current() -> None:
    if not torch.__version__.startswith("2.14."):
        pytest.skip("its operations are those of torch 2.14")
    script = pathlib.Path(__file__).parents[2] / "docs" / "make_writes_table.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)
