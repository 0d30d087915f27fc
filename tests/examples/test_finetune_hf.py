"""The Hugging Face example: converted, compiled and trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tejit

pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        yield


def test_both_runs_learn_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    from finetune_hf import main

    assert main(["--size", "tiny", "--steps", "6", "--backend", "none", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert (
        "Float8CurrentScaling on cpu: 15 layers; 0 GEMMs native, 42 GEMMs emulated; layers in high precision: 1"
        in output
    )
    # What happens is told before it happens: the first steps may take a minute.
    told = [line for line in output.splitlines() if line]
    assert [line.partition(":")[0] for line in told[:4]] == ["text", "model", "each run", "bf16"]
    assert told[2] == "each run: 6 steps of 4 x 32 bytes on cpu"
    assert told[3] == "bf16: building the model"
    assert told[4].startswith("bf16: step 1, ")
    losses = dict(re.findall(r"^(\w+) \(.*?\): validation loss (\d+\.\d+)", output, re.MULTILINE))
    assert list(losses) == ["none", "current"]
    first = float(re.search(r"bf16: step 1, loss (\d+\.\d+)", output)[1])
    assert first == pytest.approx(5.55, rel=0.1)  # ln 256: untrained
    assert float(losses["none"]) < 0.9 * first
    assert float(losses["current"]) == pytest.approx(float(losses["none"]), rel=0.02)
    assert losses["current"] != losses["none"]


def test_the_converted_model_is_one_graph_with_eager_s_loss_and_keeps_its_ties() -> None:
    from finetune_hf import SIZES, Trainer

    windows = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    trainers = [Trainer("current", SIZES["tiny"], 0, torch.device("cpu"), backend) for backend in ("none", "aot_eager")]
    eager, compiled = (trainer.step(windows) for trainer in trainers)  # fullgraph=True: a break would raise
    assert torch.equal(eager, compiled)
    # Compiled, the gradients of residual streams are added up in another order.
    second = [trainer.step(windows).item() for trainer in trainers]
    assert second[0] == pytest.approx(second[1], rel=1e-3)
    assert second[0] < eager.item()
    model = trainers[0].model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [module.name for module in model.modules() if isinstance(module, tejit.Linear)]
    assert len(names) == 14
    assert names[0] == "model.layers.0.self_attn.q_proj"
