"""info: what the machine has, as values, text and a table."""

import json
import subprocess
import sys

import pytest
import torch

import tejit
from tejit import device as hardware
from tejit.inspect.info import for_command_line


def test_info_tells_what_the_command_line_does_and_which_gemms_are_native() -> None:
    found = tejit.info()
    assert found["torch"] == torch.__version__
    assert {"python", "tools", "directories", "parts", "missing"} <= set(found)
    device = torch.device(found["device"])
    native, reason = tejit.is_mxfp8_available(return_reason=True, device=device)
    assert found["gemm"]["MXFP8"] == ("native" if native else reason)
    assert tejit.info("meta")["gemm"]["NVFP4"].startswith("meta has no NVFP4 GEMM")
    json.dumps(found)


def test_info_is_a_text_and_a_table() -> None:
    found = tejit.info("cpu")
    text, html = str(found), found._repr_html_()
    assert text.startswith("device: cpu\ngemm:\n  FP8, one scale: cpu has no FP8 GEMM")
    assert f"torch: {torch.__version__}" in text
    assert html.count("<tr>") == html.count("</tr>") >= len(found)
    assert f">{torch.__version__}</td>" in html


def test_the_command_line_tells_the_same() -> None:
    """But for what it loads, which is nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tejit", "info", "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    found, want = json.loads(done.stdout), json.loads(json.dumps(tejit.info()))
    assert list(found) == list(want)
    assert found.pop("loaded").startswith("nothing by this command")
    del want["loaded"]
    for volatile in ("environment", "directories", "parts"):  # of this process, of other tests
        assert type(found.pop(volatile)) is type(want.pop(volatile))
    assert found == want
    text = subprocess.run([sys.executable, "-m", "tejit", "info"], capture_output=True, text=True, timeout=120).stdout
    assert text.startswith(f"device: {want['device']}\ngemm:\n  FP8, one scale: ")


def test_a_driver_that_fails_is_told_by_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device):
        raise RuntimeError("CUDA driver on purpose")

    monkeypatch.setattr(hardware, "resolve_device", fails)
    found = for_command_line()
    assert found["device"] is None
    assert found["gemm"] == {"error": "CUDA driver on purpose"}
    assert found["torch"] == torch.__version__
    with pytest.raises(RuntimeError, match="on purpose"):
        tejit.info()
