"""``torch.export`` and AOTInductor: a model with ``Linear`` under a recipe and with a quantized weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tejit
from tejit import ops
from tejit.recipe import Float8BlockScaling, Float8CurrentScaling
from tests.dynamo.samples import QUANTIZERS


class Layers(nn.Module):
    """A quantized layer, and a weight that is kept quantized."""

    def __init__(self, recipe, quantizer):
        super().__init__()
        torch.manual_seed(0)
        self.recipe = recipe
        self.fc = tejit.Linear(64, 32)
        self.weight = nn.Parameter(quantizer.quantize(torch.randn(16, 32)), requires_grad=False)

    def forward(self, x):
        with tejit.autocast(recipe=self.recipe):
            x = self.fc(x)
        return F.linear(F.gelu(x), self.weight.dequantize())


def exported(module, x, strict):
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        return torch.export.export(module, (x,), dynamic_shapes=({0: batch},), strict=strict)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("name", ["current", "block_2d", "hybrid"])
@pytest.mark.parametrize("make_recipe", [Float8CurrentScaling, Float8BlockScaling])
def test_export_equals_eager_for_other_batches_and_after_a_file(make_recipe, name, strict, tmp_path) -> None:
    module, x = Layers(make_recipe(), QUANTIZERS[name]).eval(), torch.randn(4, 64)
    program = exported(module, x, strict)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    with torch.no_grad():
        for rows in (4, 2, 9):
            x = torch.randn(rows, 64)
            assert torch.equal(program.module()(x), module(x))
            assert torch.equal(loaded.module()(x), module(x))


def test_ops_that_take_a_quantizer_export() -> None:
    """They run from the program in memory; torch cannot read them back from a file."""

    class Fake(nn.Module):
        def forward(self, x):
            return ops.fake_quantize(x, QUANTIZERS["block_1d"])

    program, x = exported(Fake(), torch.randn(4, 64), strict=False), torch.randn(3, 64)
    assert torch.equal(program.module()(x), Fake()(x))
    assert "tejit.fake_quantize.default" in [str(node.target) for node in program.graph.nodes]


def test_aot_inductor_on_the_cpu(tmp_path) -> None:
    """The quantize op is called from the compiled program, the weight is dequantized in it."""
    module, x = Layers(Float8CurrentScaling(), QUANTIZERS["current"]).eval(), torch.randn(4, 64)
    program = exported(module, x, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        for rows in (4, 9):
            x = torch.randn(rows, 64)
            got, want = loaded(x), module(x)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
