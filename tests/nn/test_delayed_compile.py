"""Delayed scaling in graphs: one graph, no recompile, and a state that equals eager's to the bit."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling
from tests.common import DEVICES
from tests.nn.test_blocks_of_layers import WIDTH, assert_close, gradients, two_blocks
from tests.nn.test_compile import close
from tests.nn.test_delayed import assert_same, state

RECIPE = DelayedScaling(amax_history_len=4)


def linear(device: str = "cpu") -> tejit.Linear:
    return tejit.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)


def pair(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(linear(device), nn.GELU(), linear(device))


def three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(linear(), linear(), linear())


class Twins:
    """An eager model and a compiled one that start equal and see the same steps."""

    def __init__(self, make, compiler: str = "aot_eager", inside: bool = False, recipe=RECIPE, forward=None) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.eager, self.module, self.recipe = make(), make(), recipe
        self.forward = forward if forward is not None else (lambda module, x: module(x))
        self.counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
        self.inside = inside

        def region(x):
            if not inside:
                return self.forward(self.module, x)
            with tejit.autocast(recipe=recipe):
                return self.forward(self.module, x)

        self.compiled = torch.compile(region, backend=self.counter, fullgraph=True)

    def _eager(self, x):
        with tejit.autocast(recipe=self.recipe):
            return self.forward(self.eager, x)

    def _compiled(self, x):
        if self.inside:
            return self.compiled(x)
        with tejit.autocast(recipe=self.recipe):
            return self.compiled(x)

    def step(self, x: torch.Tensor, exact: bool = True) -> None:
        grad = torch.randn_like(x)
        want = gradients(self._eager, self.eager, x, grad)
        got = gradients(self._compiled, self.module, x, grad)
        for what in want:
            assert close(got[what], want[what], exact), what
        if exact:
            assert_same(state(self.module), state(self.eager))

    def train(self, learning_rate: float) -> None:
        """A step by the eager model's gradients, in both."""
        with torch.no_grad():
            for mine, other in zip(self.eager.parameters(), self.module.parameters(), strict=True):
                mine.sub_(mine.grad.clamp(-1, 1), alpha=learning_rate)
                other.copy_(mine)

    def one_graph(self) -> None:
        assert self.counter.frame_count == 1
        assert not torch._dynamo.utils.counters["graph_break"]


def batch(step: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn((6, 32, 33)[step % 3], WIDTH, generator=generator) * (step + 1)).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", pytest.param("torch", marks=pytest.mark.full)])
@pytest.mark.parametrize("inside", [False, True], ids=["context outside", "context inside"])
def test_ten_steps_are_one_graph_and_eager_s_history(inside, how, device, need_kernels) -> None:
    """Changing data, weights and learning rates, three batch sizes, an eager evaluation in between."""
    if how == "kernels":
        need_kernels(device)
    with tejit.backend(how):
        twins = Twins(lambda: pair(device), inside=inside)
        for step in range(10):
            twins.step(batch(step, device))
            twins.train(1e-3 / (step + 1))
            with torch.no_grad(), tejit.autocast(recipe=RECIPE):
                twins.module(batch(step + 1, device))
    twins.one_graph()
    assert twins.eager[0]._delayed_amax_history[1:4].all()
    assert twins.eager[0]._delayed_grad_amax_history[1:4].all()


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.full)])
def test_under_inductor(inside) -> None:
    """Where inductor fuses, a value in between may be an ulp off, and so may be amax: compared as gradients are. The
    roll of the state is eager's to the bit: the history moves by one step each time."""
    twins = Twins(pair, "inductor", inside)
    for step in range(6):
        before = state(twins.module)
        twins.step(batch(step), exact=False)
        assert_close(state(twins.module), state(twins.eager), False, f"step {step}")
        for name, got in state(twins.module).items():
            if "history" in name:
                assert torch.equal(got[1:3], before[name][2:4])
                assert got[3].all()
                assert not got[0].any()
    twins.one_graph()


@pytest.mark.parametrize("inside", [False, True], ids=["context outside", "context inside"])
def test_a_module_used_twice_in_a_graph_rolls_once(inside) -> None:
    def twice(module, x):
        return module(torch.tanh(module(x)))

    twins = Twins(lambda: pair()[0], inside=inside)
    twins.forward = twice
    for step in range(4):
        twins.step(batch(step))
    twins.one_graph()


def test_a_compiled_module_called_twice_in_a_pass_rolls_once() -> None:
    """Two calls of one graph: only the pass around them can tell that they are one."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    eager, module = pair(), pair()
    compiled = torch.compile(module, backend=counter, fullgraph=True)

    def twice(function):
        def run(x):
            with tejit.autocast(recipe=RECIPE):
                x = torch.tanh(function(x))
                torch._dynamo.mark_dynamic(x, 0)
                return function(x)

        return run

    for step in range(4):
        x = batch(step)
        grad = torch.randn_like(x)
        want, got = gradients(twice(eager), eager, x, grad), gradients(twice(compiled), module, x, grad)
        for what in want:
            assert torch.equal(got[what], want[what]), what
        assert_same(state(module), state(eager))
    assert counter.frame_count == 1


def test_parts_compiled_on_their_own_beside_eager_ones() -> None:
    twins = Twins(pair)
    part = torch.compile(twins.module[2], backend=twins.counter, fullgraph=True)

    def run(x):
        x = twins.module[1](twins.module[0](x))
        torch._dynamo.mark_dynamic(x, 0)
        return part(x)

    twins.compiled = run
    for step in range(4):
        twins.step(batch(step))
    twins.one_graph()


@pytest.mark.parametrize(
    "inside",
    [pytest.param(False, marks=pytest.mark.full, id="context outside"), pytest.param(True, id="context inside")],
)
def test_other_recipes_around_and_back_recompile_nothing(inside) -> None:
    """Three recipes nested in one graph, each layer under its own."""
    delayed = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    current = Float8CurrentScaling()

    def forward(module, x):
        x = module[0](x)
        with tejit.autocast(recipe=current):
            x = module[1](x)
            with tejit.autocast(recipe=delayed):
                x = module[2](x)
        return module[0](x)

    twins = Twins(three, inside=inside, forward=forward)
    for step in range(4):
        twins.step(batch(step))
    twins.one_graph()
    assert not state(twins.eager[1])["_delayed_amax_history"].any()
    assert twins.eager[2]._delayed_amax_history[1].all()


def test_two_recipes_are_two_graphs_and_returning_recompiles_nothing() -> None:
    twins = Twins(pair)
    for count, recipe in enumerate([RECIPE, DelayedScaling(margin=1), RECIPE, DelayedScaling(amax_history_len=4)], 1):
        twins.recipe = recipe
        twins.step(batch(count))
        assert twins.counter.frame_count == min(count, 2)


def test_an_evaluation_in_a_graph_leaves_the_state_alone() -> None:
    twins = Twins(pair)
    twins.step(batch(0))
    assert list(twins.module.state_dict()) == list(twins.eager.state_dict())  # the first step makes keys of the state
    assert "0._delayed_scale" in twins.module.state_dict()
    before = state(twins.module)
    with torch.no_grad(), tejit.autocast(recipe=RECIPE):
        assert torch.equal(twins.compiled(batch(1)), twins.eager(batch(1)))
    assert_same(state(twins.module), before)
    twins.step(batch(2))


def test_calibrating_in_a_graph() -> None:
    torch._dynamo.reset()
    eager, module = pair(), pair()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(3):
        with torch.no_grad(), tejit.autocast(enabled=False, recipe=RECIPE, calibrating=True):
            assert torch.equal(compiled(batch(step)), eager(batch(step)))
        assert_same(state(module), state(eager))
    assert eager[0]._delayed_amax_history[1:4].all()


@pytest.mark.parametrize("inside", [False, True], ids=["context outside", "context inside"])
def test_two_passes_before_their_backwards(inside) -> None:
    """The second backward finds gradient scales that the first one has changed, as in eager code."""
    twins = Twins(lambda: pair()[0], inside=inside)
    for step in range(3):
        for function, module in ((twins._eager, twins.eager), (twins._compiled, twins.module)):
            module.zero_grad()
            inputs = [batch(step), batch(step + 1)]
            for x in inputs:
                torch._dynamo.mark_dynamic(x, 0)
            for y in [function(x) for x in inputs]:
                y.float().square().sum().backward()
        assert_same(state(twins.module), state(twins.eager))
        assert torch.equal(twins.module.weight.grad, twins.eager.weight.grad)
    twins.one_graph()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_compiled_module_in_an_eager_checkpoint(reentrant) -> None:
    """With backward inside of autocast, as for every recipe."""
    torch._dynamo.reset()
    eager, module = pair()[0], pair()[0]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(3):
        results = []
        for function, owner in ((eager, eager), (compiled, module)):
            x = batch(0).mul(step + 1).requires_grad_()
            owner.zero_grad()
            with tejit.autocast(recipe=RECIPE):
                y = function(x) if owner is eager else checkpoint(function, x, use_reentrant=reentrant)
                y.float().square().sum().backward()
            results.append({"y": y.detach(), "dgrad": x.grad, "wgrad": owner.weight.grad.clone(), **state(owner)})
        assert_same(results[1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["context outside", "context inside"])
def test_reduce_overhead_moves_the_history(inside) -> None:
    """Graphs were captured, and the state follows an eager twin's over replays with new data."""
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    module, recipe = two_blocks("cuda"), RECIPE

    def region(x):
        if not inside:
            return module(x)
        with tejit.autocast(recipe=recipe):
            return module(x)

    compiled = torch.compile(region, mode="reduce-overhead", fullgraph=True)
    for step in range(8):
        before = state(module)
        module.zero_grad()  # the gradients lie in the graphs' own memory
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(128, WIDTH, device="cuda", dtype=torch.bfloat16) * (step + 1)
        grad = torch.randn_like(x)
        with tejit.autocast(enabled=not inside, recipe=recipe):
            y = compiled(x.requires_grad_())
        y.backward(grad)
        with torch.no_grad(), tejit.autocast(recipe=recipe):
            module(x)
        after = state(module)
        for name in (n for n in after if "history" in n):
            assert torch.equal(after[name][1:3], before[name][2:4]), (step, name)
            assert after[name][3].all(), (step, name)
        assert after["0.up._delayed_amax_history"][3, 0] == x.detach().abs().max()
        assert after["1.down._delayed_grad_amax_history"][3, 0] == grad.abs().max()
    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    assert manager.new_graph_id().id >= 2, "forward and backward were captured"


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_a_captured_step_moves_the_history(how) -> None:
    """Forward, roll, backward and roll in a CUDA graph made by hand: every replay is a step of an eager twin."""
    module, twin = two_blocks("cuda"), two_blocks("cuda")
    x = torch.randn(128, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)

    def step(model: nn.Module) -> torch.Tensor:
        with tejit.autocast(recipe=RECIPE):
            y = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=how == "reentrant")
        y.backward(grad)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(module)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(module)
    twin.load_state_dict(module.state_dict())
    for replay in range(5):
        with torch.no_grad():
            x.normal_().mul_(replay + 1)
            grad.normal_()
        graph.replay()
        with torch.no_grad(), tejit.autocast(recipe=RECIPE):
            module(x * 100)
        assert torch.equal(step(twin), y), replay
        assert_same(state(module), state(twin))
