"""Where a weight's gradient goes does not depend on whether its product is quantized: without autocast, and where an
override keeps a layer in high precision, `main_grad` and `backward_dw` work too. The oracle is torch's own gradient."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit.recipe import Float8CurrentScaling, MXFP8BlockScaling
from tests.common import DEVICES

MODULES = {
    "Linear": lambda **a: tejit.Linear(48, 40, **a),
    "LayerNormLinear": lambda **a: tejit.LayerNormLinear(48, 40, **a),
    "LayerNormMLP": lambda **a: tejit.LayerNormMLP(48, 80, activation="geglu", **a),
    "checkpoint=True": lambda **a: tejit.LayerNormMLP(48, 80, checkpoint=True, **a),
    "GroupedLinear": lambda **a: Experts(**a),
    "TransformerLayer": lambda **a: tejit.TransformerLayer(
        48, 80, 4, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal", **a
    ),
}
CONTEXTS = {
    "none": lambda: tejit.autocast(enabled=False),
    "override": lambda: tejit.autocast(recipe=Float8CurrentScaling(overrides=(("part*", None),))),
}


class Experts(nn.Module):
    def __init__(self, **arguments) -> None:
        super().__init__()
        self.part = tejit.GroupedLinear(3, 48, 40, **arguments)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return self.part(x, [5, 0, x.shape[0] * x.shape[1] - 5], is_first_microbatch)

    def backward_dw(self) -> None:
        self.part.backward_dw()


def made(kind: str, device: str, **arguments) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[kind](device=device, name="part", **arguments)


def passes(module: nn.Module, context, function=None, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 48, generator=generator).to(next(module.parameters()).device)
    with context():
        y = (module if function is None else function)(x, **options)
    y.square().sum().backward()
    return y.detach()


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("fused", "late"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", MODULES)
def test_gradients_go_where_the_switches_say(kind, fused, late, context, device) -> None:
    plain = made(kind, device)
    module = made(kind, device, fuse_wgrad_accumulation=fused, delay_wgrad_compute=late)
    y = passes(plain, CONTEXTS["none"])
    for p in weights_of(module).values():
        p.main_grad = torch.full_like(p, float("nan"))
    for first in (True, False):  # overwrites, then adds
        assert torch.equal(passes(module, CONTEXTS[context], is_first_microbatch=first), y)
        if late:
            assert all(p.main_grad.isnan().all() for p in weights_of(module).values()) or not first
            module.backward_dw()
    for name, p in plain.named_parameters():
        mine = dict(module.named_parameters())[name]
        if fused and p.dim() == 2:
            assert mine.grad is None
            assert torch.equal(mine.main_grad, 2 * p.grad), name
        else:
            assert torch.equal(mine.grad, 2 * p.grad), name


def test_it_is_said_where_main_grad_is_missing_and_who_waits_is_told() -> None:
    module = tejit.Linear(48, 40, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"weight\.main_grad"):
        passes(module, CONTEXTS["none"])
    with torch.no_grad():
        module(torch.randn(3, 48))  # no gradient, no need
    module.weight.main_grad = torch.zeros(40, 48, dtype=torch.float64)
    module.weight.grad_added_to_main_grad, module.weight.zero_out_wgrad = False, True
    passes(module, CONTEXTS["none"])
    assert module.weight.grad_added_to_main_grad
    assert not module.weight.grad.any()
    assert module.weight.main_grad.any()


def test_inside_torch_autocast_and_with_quantized_weights() -> None:
    with tejit.quantized_model_init(recipe=MXFP8BlockScaling()):
        torch.manual_seed(0)
        module = tejit.LayerNormLinear(64, 96, fuse_wgrad_accumulation=True)
    plain = tejit.LayerNormLinear(64, 96)
    state = module.state_dict()
    plain.load_state_dict(state | {"weight": state["weight"].dequantize()})
    module.weight.main_grad = torch.zeros(96, 64)
    x = torch.randn(8, 64)
    for m in (module, plain):
        with torch.autocast("cpu", torch.bfloat16):
            m(x).square().sum().backward()
    assert torch.equal(module.weight.main_grad, plain.weight.grad)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
def test_main_grad_in_one_graph(kind) -> None:
    torch._dynamo.reset()
    plain, module = made(kind, "cpu"), made(kind, "cpu", fuse_wgrad_accumulation=True)
    for p in weights_of(module).values():
        p.main_grad = torch.zeros_like(p)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    passes(plain, CONTEXTS["none"])
    for _ in range(2):
        passes(module, CONTEXTS["override"], compiled)
    for name, p in weights_of(plain).items():
        assert torch.equal(weights_of(module)[name].main_grad, 2 * p.grad), name
    assert counter.frame_count == 1
