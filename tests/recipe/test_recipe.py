"""Recipes and autocast."""

import contextlib
import copy
import dataclasses
import pickle
import threading
import warnings

import pytest
import torch

import tejit
from tejit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    current_recipe,
    default_recipe,
)


def test_recipes_are_values() -> None:
    assert Float8CurrentScaling() == Float8CurrentScaling()
    assert hash(Float8CurrentScaling()) == hash(Float8CurrentScaling())
    assert Float8CurrentScaling() != Float8CurrentScaling(amax_epsilon=0.1)
    assert pickle.loads(pickle.dumps(Float8CurrentScaling(amax_epsilon=0.1))) == Float8CurrentScaling(amax_epsilon=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Float8CurrentScaling().amax_epsilon = 1.0


def test_typos_and_nonsense_are_errors() -> None:
    with pytest.raises(TypeError, match="amax_epsilom"):
        Float8CurrentScaling(amax_epsilom=1.0)
    with pytest.raises(TypeError, match="fp8_format is 'HYBRID'"):
        Float8CurrentScaling(fp8_format="HYBRID")
    with pytest.raises(ValueError, match="E5M2 by E5M2"):
        Float8CurrentScaling(fp8_format=Format.E5M2)
    with pytest.raises(ValueError, match="amax_epsilon is -1"):
        Float8CurrentScaling(amax_epsilon=-1)
    with pytest.raises(TypeError, match="recipe is 'fp8'"):
        tejit.autocast(recipe="fp8")
    with pytest.raises(TypeError, match="a recipe is given as recipe="):
        tejit.autocast(Float8CurrentScaling())
    with pytest.raises(TypeError, match="fast_accum_fprop is 'no'"):
        Float8CurrentScaling(fast_accum_fprop="no")


def test_every_switch_reaches_every_quantizer() -> None:
    """TransformerEngine's own switch does not reach its quantizers; here each does."""
    plain, switched = Float8CurrentScaling(), Float8CurrentScaling(force_pow_2_scales=True, amax_epsilon=0.25)
    for recipe, pow2, eps in ((plain, False, 0.0), (switched, True, 0.25)):
        for variants in (recipe.linear.input, recipe.linear.weight, recipe.linear.grad_output):
            for quantizer in variants:
                assert quantizer.force_pow_2_scales is pow2
                assert quantizer.amax_epsilon == eps
                assert quantizer.internal
            assert [q.get_usages() for q in variants] == [
                {"rowwise": True, "columnwise": False},
                {"rowwise": False, "columnwise": True},
                {"rowwise": True, "columnwise": True},
            ]
    hybrid, e4m3 = Float8CurrentScaling().linear, Float8CurrentScaling(fp8_format=Format.E4M3).linear
    assert hybrid.input.both.fp8_dtype == hybrid.weight.both.fp8_dtype == torch.float8_e4m3fn
    assert hybrid.grad_output.both.fp8_dtype == torch.float8_e5m2
    assert e4m3.grad_output.both.fp8_dtype == torch.float8_e4m3fn
    for name in ("fast_accum_fprop", "fast_accum_dgrad", "fast_accum_wgrad"):
        for value in (True, False):
            assert getattr(Float8CurrentScaling(**{name: value}).linear, name) is value


def test_block_scaling_is_a_value_and_refuses_nonsense() -> None:
    recipe = Float8BlockScaling()
    assert recipe == Float8BlockScaling()
    assert recipe != Float8BlockScaling(x_block_scaling_dim=2)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(ValueError, match="E5M2 by E5M2"):
        Float8BlockScaling(fp8_format=Format.E5M2)
    with pytest.raises(ValueError, match="block_scaling_dim is 0"):
        Float8BlockScaling(w_block_scaling_dim=0)
    with pytest.raises(ValueError, match="amax_epsilon is -1"):
        Float8BlockScaling(amax_epsilon=-1)


def test_every_switch_of_block_scaling_reaches_its_quantizers() -> None:
    plain, switched = (
        Float8BlockScaling(),
        Float8BlockScaling(Format.HYBRID, 2, 1, 2, force_pow_2_scales=False, amax_epsilon=0.25),
    )
    for recipe, dims, pow2, eps in ((plain, (1, 2, 1), True, 0.0), (switched, (2, 1, 2), False, 0.25)):
        linear = recipe.linear
        for variants, dim in zip((linear.input, linear.weight, linear.grad_output), dims, strict=True):
            for quantizer in variants:
                assert quantizer.block_scaling_dim == dim
                assert quantizer.force_pow_2_scales is pow2
                assert quantizer.amax_epsilon == eps
                assert quantizer.internal
    assert plain.linear.grad_output.both.fp8_dtype == torch.float8_e4m3fn
    assert switched.linear.grad_output.both.fp8_dtype == torch.float8_e5m2
    assert switched.linear.weight.both.fp8_dtype == torch.float8_e4m3fn


def test_mxfp8_block_scaling_and_its_switches() -> None:
    """NeMo/Megatron-Bridge#638: E4M3 is the default, HYBRID warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, tiles = MXFP8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)
    with pytest.warns(UserWarning, match="diverge"):
        mixed = MXFP8BlockScaling(Format.HYBRID)
    assert plain == MXFP8BlockScaling() != tiles
    assert pickle.loads(pickle.dumps(plain)) == plain
    for recipe, square, backward in (
        (plain, False, torch.float8_e4m3fn),
        (tiles, True, torch.float8_e4m3fn),
        (mixed, False, torch.float8_e5m2),
    ):
        linear = recipe.linear
        assert linear.input.both.fp8_dtype == linear.weight.both.fp8_dtype == torch.float8_e4m3fn
        assert linear.grad_output.both.fp8_dtype == backward
        assert linear.weight.both.with_2d_quantization is square
        assert not linear.input.both.with_2d_quantization
        assert not linear.grad_output.both.with_2d_quantization
    with pytest.raises(ValueError, match="E5M2 by E5M2"):
        MXFP8BlockScaling(Format.E5M2)
    with pytest.raises(TypeError, match="enable_2d_quantization is 1"):
        MXFP8BlockScaling(enable_2d_quantization=1)


def test_nvfp4_block_scaling_and_its_switches() -> None:
    def facts(**switches):
        linear = NVFP4BlockScaling(**switches).linear
        return {
            name: (q.both.with_rht, q.both.stochastic_rounding, q.both.with_2d_quantization, q.both.nvfp4_e4m3_max)
            for name, q in (("x", linear.input), ("w", linear.weight), ("dy", linear.grad_output))
        }

    plain = {"x": (True, False, False, 448), "w": (False, False, True, 448), "dy": (True, True, False, 448)}
    assert facts() == plain
    off = {"x": (False, False, False, 448), "dy": (False, True, False, 448)}
    assert facts(disable_rht=True) == {**plain, **off}
    assert facts(disable_stochastic_rounding=True) == {**plain, "dy": (True, False, False, 448)}
    assert facts(disable_2d_quantization=True) == {**plain, "w": (False, False, False, 448)}
    assert facts(four_over_six="weights") == {**plain, "w": (False, False, True, 256)}
    assert facts(four_over_six="activations") == {**plain, **off, "x": (False, False, False, 256)}
    assert facts(four_over_six="all")["w"] == (False, False, True, 256)
    assert facts(row_scaled_activation=True) == {**plain, **off}
    rows = NVFP4BlockScaling(row_scaled_activation=True).linear
    assert all(q.row_scaled_nvfp4 for q in rows.input)
    assert not rows.grad_output.both.row_scaled_nvfp4
    assert NVFP4BlockScaling() == NVFP4BlockScaling() != NVFP4BlockScaling(disable_rht=True)
    with pytest.raises(ValueError, match="four_over_six is 'gradients'"):
        NVFP4BlockScaling(four_over_six="gradients")
    with pytest.raises(TypeError, match="disable_rht is 'no'"):
        NVFP4BlockScaling(disable_rht="no")
    with pytest.raises(TypeError, match="disable_rth"):
        NVFP4BlockScaling(disable_rth=True)


def test_force_pow_2_scales_gives_powers_of_two() -> None:
    recipe = Float8CurrentScaling(force_pow_2_scales=True)
    scale_inv = recipe.linear.input.both.quantize(torch.randn(8, 8))._scale_inv
    assert torch.frexp(scale_inv).mantissa.item() == 0.5


def test_autocast_nests_is_reentrant_and_restores_after_errors() -> None:
    outer, inner = Float8CurrentScaling(), Float8CurrentScaling(amax_epsilon=0.5)
    assert current_recipe() is None
    context = tejit.autocast(recipe=outer)
    for _ in range(2):
        with context, context:
            assert current_recipe() is outer
            with tejit.autocast(recipe=inner):
                assert current_recipe() is inner
            with tejit.autocast(enabled=False):
                assert current_recipe() is None
            assert current_recipe() is outer
        assert current_recipe() is None
    with pytest.raises(KeyError), tejit.autocast():
        raise KeyError
    assert current_recipe() is None
    with tejit.autocast():
        assert current_recipe() == default_recipe()


def test_autocast_decorates_functions() -> None:
    outer, recipe = Float8CurrentScaling(), Float8CurrentScaling(amax_epsilon=0.5)

    @tejit.autocast(recipe=recipe)
    def asked(depth, *, fails=False):
        """Of this test."""
        if fails:
            raise KeyError
        return [current_recipe(), *(asked(depth - 1) if depth else [])]

    class Layer(tejit.Linear):
        @tejit.autocast(recipe=recipe)
        def forward(self, x):
            return super().forward(x)

    assert asked.__name__ == "asked"
    assert asked.__doc__ == "Of this test."
    with tejit.autocast(recipe=outer):
        assert asked(2) == [recipe] * 3
        with pytest.raises(KeyError):
            asked(0, fails=True)
        assert current_recipe() is outer
        assert tejit.autocast(enabled=False)(current_recipe)() is None
    assert current_recipe() is None
    assert tejit.autocast()(current_recipe)() == default_recipe()
    layer, x = Layer(32, 32), torch.randn(4, 32)
    with tejit.autocast(recipe=recipe):
        want = tejit.Linear.forward(layer, x)
    assert torch.equal(layer(x), want)
    assert not torch.equal(tejit.Linear.forward(layer, x), want)


def test_each_call_of_a_decorated_function_is_a_step_of_delayed_scaling() -> None:
    recipe, batches = DelayedScaling(amax_history_len=3), [torch.randn(4, 32) * (i + 1) for i in range(3)]
    layers = [tejit.Linear(32, 32) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    decorated = tejit.autocast(recipe=recipe)(layers[0])
    for x in batches:
        with tejit.autocast(recipe=recipe):
            want = layers[1](x)
        assert torch.equal(decorated(x), want)
    assert layers[0]._delayed_scale.tolist() == layers[1]._delayed_scale.tolist() != [1.0, 1.0]


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
def test_a_decorated_function_is_one_graph(recipe) -> None:
    layer, x = tejit.Linear(32, 32), torch.randn(4, 32)
    twin = copy.deepcopy(layer)

    @tejit.autocast(recipe=recipe)
    def forward(x):
        return layer(x).square()

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for number in range(1, 3):
        with tejit.autocast(recipe=recipe):
            want = twin(number * x).square()
        assert torch.equal(compiled(number * x), want)
        assert not torch.equal(layer(number * x).square(), want)


def test_what_autocast_cannot_decorate_is_an_error() -> None:
    def generator():
        yield current_recipe()

    async def coroutine():
        return current_recipe()

    async def both():
        yield current_recipe()

    class Generates:
        def __call__(self):
            yield current_recipe()

    for function in (generator, coroutine, both, contextlib.contextmanager(generator), Generates()):
        name = getattr(function, "__name__", "Generates")
        with pytest.raises(TypeError, match=rf"{name}.*runs after its call has returned.*with tejit"):
            tejit.autocast()(function)
    for other in (None, 3, torch.nn.Linear):
        with pytest.raises(TypeError, match="must be a function or a method"):
            tejit.autocast()(other)


def test_autocast_is_a_thread_s_own() -> None:
    seen = []
    with tejit.autocast():
        thread = threading.Thread(target=lambda: seen.append(current_recipe()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_availability_gives_the_reason() -> None:
    available, reason = tejit.is_fp8_available(return_reason=True, device="cpu")
    assert available is False
    assert "cpu" in reason
    assert tejit.is_fp8_available(device="cpu") is False
    available, reason = tejit.is_fp8_block_scaling_available(return_reason=True, device="cpu")
    assert available is False
    assert "cpu" in reason


@pytest.mark.gpu
def test_availability_on_the_gpu() -> None:
    native = torch.cuda.get_device_capability() >= (8, 9)
    assert tejit.is_fp8_available() is native
    assert tejit.is_fp8_available(return_reason=True)[1] == "" or not native
    blocks, reason = tejit.is_fp8_block_scaling_available(return_reason=True)
    assert blocks is (reason == "")
    assert not blocks or torch.cuda.get_device_capability() == (9, 0)


def test_one_context_in_two_threads_keeps_them_apart() -> None:
    shared, outer, inner = tejit.autocast(recipe=Float8CurrentScaling()), Float8CurrentScaling(amax_epsilon=0.5), []
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with shared:
            entered.set()
            left.wait(30)
        inner.append(current_recipe())

    thread = threading.Thread(target=other)
    with tejit.autocast(recipe=outer):
        thread.start()
        assert entered.wait(30)
        with shared:
            pass
        left.set()
        thread.join()
        assert current_recipe() is outer
    assert inner == [None]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (None, "Float8CurrentScaling"),
        ((8, 0), "Float8CurrentScaling"),
        ((9, 0), "Float8CurrentScaling"),
        ((10, 0), "MXFP8BlockScaling"),
        ((10, 3), "MXFP8BlockScaling"),
        ((12, 0), "Float8CurrentScaling"),
    ],
)
def test_the_default_recipe_is_the_hardware_s(capability, name, compiled, monkeypatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("tejit.recipe.context.hardware.cuda_capability", lambda device: capability)
    layer, x = tejit.Linear(32, 32), torch.randn(32, 32)

    def run(x):
        with tejit.autocast():
            return layer(x)

    assert default_recipe() == getattr(tejit.recipe, name)()
    with tejit.autocast(recipe=getattr(tejit.recipe, name)()):
        want = layer(x)
    got = torch.compile(run, backend="eager", fullgraph=True)(x) if compiled else run(x)
    assert torch.equal(got, want)
