"""Norms of weights that torch reparametrizes, on layers whose weights live quantized (row 90 of the field cases)."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import tejit
from tejit.tensor import QuantizedTensor
from tests.nn.recipes import RECIPES
from tests.tensor.test_parameter_values import QUANTIZERS

NAMES = ("current", "delayed", "block", "MXFP8", "MXFP8 2D", "NVFP4 nearest")
NORMS = {
    "spectral_norm": spectral_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "weight_norm": weight_norm,
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}
SHAPES = [
    (128,),
    (64,),
    (1,),
    (),
    (0,),
    (5, 7),
    (32, 5),
    (5, 32),
    (64, 128),
    (16, 16),
    (2, 3, 32),
    (3, 32, 32),
    (0, 32),
]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("rows", [True, False], ids=["both", "columnwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_90_new_empty_of_any_shape_is_a_tensor_to_write_to(name, shape, rows) -> None:
    quantizer = QUANTIZERS[name]
    if not rows and not quantizer.needs_rowwise():
        quantizer = quantizer.with_usage(rowwise=False)
    tensor = quantizer(torch.randn(64, 128))
    for made in (tensor.new_empty(shape), torch.empty_like(tensor).new_empty(shape, dtype=torch.bfloat16)):
        assert made.shape == shape
        assert made.device == tensor.device
        assert isinstance(made, QuantizedTensor) == quantizer.is_quantizable(torch.empty(shape))
        made.copy_(torch.ones(shape))
        assert torch.equal(made.dequantize() if isinstance(made, QuantizedTensor) else made, torch.ones_like(made))
    assert made.dtype == torch.bfloat16


@pytest.mark.parametrize("name", QUANTIZERS)
def test_90_new_empty_strided_is_plain(name) -> None:
    made = QUANTIZERS[name](torch.randn(64, 128)).new_empty_strided((4, 3), (1, 4))
    assert type(made) is torch.Tensor
    assert (made.shape, made.stride(), made.dtype) == ((4, 3), (1, 4), torch.float32)


@pytest.mark.parametrize("wrapped", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_90_norms_of_weights_on_quantized_weights(name, wrapped) -> None:
    """Forward, backward and a step; the layer computes with the weight that torch's own layer has of those values."""
    torch.manual_seed(0)
    with tejit.quantized_model_init(recipe=RECIPES[name]):
        layer = tejit.Linear(64, 64)
    assert isinstance(layer.weight, QuantizedTensor)
    other = nn.Linear(64, 64)
    with torch.no_grad():
        other.weight.copy_(layer.weight.dequantize())
        other.bias.copy_(layer.bias)
    for each in (layer, other):
        torch.manual_seed(1)
        NORMS[wrapped](each)
        if "spectral_norm" in wrapped:
            for _ in range(30):  # power iterations: the vectors come from random ones
                each(torch.zeros(32, 64))
    x = torch.randn(32, 64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), other(x), rtol=0.05, atol=0.05)
    with tejit.autocast(recipe=RECIPES[name]):
        y = layer(x)
    y.square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1e-4).step()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert type(parameter.grad) is torch.Tensor
    assert torch.isfinite(layer(x)).all()
