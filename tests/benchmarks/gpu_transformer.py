"""A training step of a transformer layer, forward and backward, in FP8 with current scaling against the same layer in
bfloat16, both compiled, on the GPU.

    python -m tests.benchmarks.gpu_transformer [--batch 4 --sequence 4096 --hidden 4096 --heads 32] [--out results.json]

The MLP is four times as wide as the layer; there is no dropout. Prints the time of each and the ratio.
"""

from __future__ import annotations

import argparse
import pathlib

import torch

import tejit
from tejit.recipe import Float8CurrentScaling
from tests.benchmarks.measure import event_medians, write


def measure(batch: int, sequence: int, hidden: int, heads: int) -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(batch, sequence, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    recipe = Float8CurrentScaling()
    layer = tejit.TransformerLayer(
        hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, device="cuda", dtype=torch.bfloat16
    )
    wanted = [x, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True)

    def step(quantize: bool) -> None:
        with tejit.autocast(enabled=quantize, recipe=recipe if quantize else None):
            out = compiled(x)
        torch.autograd.grad(out, wanted, grad)

    times = event_medians({"bf16": lambda: step(False), "fp8": lambda: step(True)}, in_a_row=4)
    return {"bf16_us": times["bf16"], "fp8_us": times["fp8"], "speedup": times["bf16"] / times["fp8"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    for name, default in (("batch", 4), ("sequence", 4096), ("hidden", 4096), ("heads", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    size = {"batch": options.batch, "sequence": options.sequence, "hidden": options.hidden, "heads": options.heads}
    found = measure(**size)
    print(
        f"{size}: bf16 {found['bf16_us']:.0f} us, fp8 {found['fp8_us']:.0f} us, {found['speedup']:.2f} times as fast"
        " (wanted: at least 1.25)"
    )
    write(options.out, {"benchmark": "gpu_transformer", **size, "results": found})


if __name__ == "__main__":
    main()
