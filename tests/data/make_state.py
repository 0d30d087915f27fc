"""Writes `state_torch_2_11.pt`: the state dict of a quantized layer for each recipe, and a parameter with what was
attached to it. Run by hand under that release of torch; the test loads the file under every other.

    python tests/data/make_state.py [FILE]
"""

import pathlib
import sys

import torch

import tejit
from tejit import recipe as recipes

HERE = pathlib.Path(__file__).parent
ROWS, COLUMNS = 32, 64

RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}


def values() -> torch.Tensor:
    """The weight before quantization, float32 ``(ROWS, COLUMNS)``: the same under every release of torch."""
    return (torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) * 37 % 101 - 50) / 16.0


def layer(name: str) -> tejit.Linear:
    with tejit.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        return tejit.Linear(COLUMNS, ROWS, init_method=lambda weight: weight.copy_(values()))


if __name__ == "__main__":
    layers = {name: layer(name) for name in RECIPES}
    state = {name: module.state_dict() for name, module in layers.items()}
    file = {"torch": str(torch.__version__), "state": state, "parameter": layers["mxfp8"].weight}
    torch.save(file, sys.argv[1] if len(sys.argv) > 1 else HERE / "state_torch_2_11.pt")
