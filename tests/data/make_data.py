"""Writes the oracle files of this folder. Run by hand; the tests read only the files.

    python tests/data/make_data.py GOLDEN.npz

``GOLDEN.npz`` is the record of what Transformer Engine 2.20.2's quantize kernels wrote on an H200; its
``current.*`` cases go into ``te_fp8_current.npz`` (bfloat16 inputs are stored as int16). Its ``b1d.*`` and
``b2d.*`` cases, of the same inputs, go into ``te_fp8_block.npz``: scales in full, of the bytes their SHA-256.
``casts.npz`` holds, for every bfloat16 and float16 value, the FP8 byte that ml_dtypes gives after
clamping to the format's maximum, with 0x7F for NaN.
"""

import hashlib
import pathlib
import sys

import ml_dtypes
import numpy as np

HERE = pathlib.Path(__file__).parent


def current_cases(path: str) -> dict[str, np.ndarray]:
    golden = np.load(path)
    wanted = [key for key in golden.files if "/current." in key]
    inputs = {key.split("/")[0] + "/x" for key in wanted}
    return {key: golden[key] for key in sorted(inputs) + sorted(wanted)}


def block_cases(path: str) -> dict[str, np.ndarray]:
    golden = np.load(path)
    found = {}
    for key in sorted(golden.files):
        if "/b1d." in key or "/b2d." in key:
            value = golden[key]
            if key.endswith(("/row", "/col")):
                value = np.frombuffer(hashlib.sha256(value.tobytes()).digest(), np.uint8)
            found[key] = value
    return found


def cast_tables() -> dict[str, np.ndarray]:
    tables = {}
    bits = np.arange(1 << 16, dtype=np.uint16)
    sources = {"bf16": bits.view(ml_dtypes.bfloat16), "f16": bits.view(np.float16)}
    targets = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
    for source_name, values in sources.items():
        values = values.astype(np.float32)
        for target_name, (dtype, largest) in targets.items():
            codes = np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
            tables[f"{source_name}.{target_name}"] = np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)
    return tables


if __name__ == "__main__":
    np.savez_compressed(HERE / "te_fp8_current.npz", **current_cases(sys.argv[1]))
    np.savez_compressed(HERE / "te_fp8_block.npz", **block_cases(sys.argv[1]))
    np.savez_compressed(HERE / "casts.npz", **cast_tables())
