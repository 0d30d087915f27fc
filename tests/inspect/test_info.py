"""info: what the machine has, as values, text and a table."""

import json

import torch

import tejit


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
