"""What test_value_graphs.py runs in two processes: prints what inductor's caches said, as JSON."""

import json
import math
import sys

import torch
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.config

import tejit
from tejit.dynamo import register_value_opaque_quantizer


@register_value_opaque_quantizer
class Tagged(tejit.Float8BlockQuantizer):
    """A class of the program's own, with a field of each awkward kind."""

    tag: str
    bound: float
    kind: torch.dtype

    def __init__(self, *arguments, tag="it's", bound=math.inf, kind=torch.float8_e5m2, **named):
        super().__init__(*arguments, **named)
        self._init_fields(tag=tag, bound=bound, kind=kind)


def main() -> None:
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    torch._inductor.config.fx_graph_cache = True
    quantizer, recipe = Tagged(bound=math.nan), tejit.recipe.Float8CurrentScaling()
    torch.manual_seed(0)
    layer = tejit.Linear(64, 32)

    @torch.compile(fullgraph=True)
    def run(x):
        with tejit.autocast(recipe=recipe):
            return layer(tejit.ops.fake_quantize(x, quantizer)), tejit.ops.quantize(x, quantizer)

    x = torch.randn(16, 64, requires_grad=True)
    y, inner = run(x)
    y.square().sum().backward()
    counters = torch._dynamo.utils.counters
    want = quantizer.quantize(x.detach())._inner()
    found = {
        "fx": [counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")],
        "aot": [counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")],
        "right": all(torch.equal(a, b) for a, b in zip(inner, want, strict=True)),
        "grad": x.grad.double().sum().item(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path]
    main()
