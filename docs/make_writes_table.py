"""Writes the table of `docs/writes.md` by running each operation: `python docs/make_writes_table.py`.

With `--check` it compares instead of writing.

Which operations there are depends on torch: made with 2.14.
"""

from __future__ import annotations

import pathlib
import sys

from table_page import main

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from tests.formats import writes
from tests.formats.registry import CASES

#: The columns: name in the table, name in the tests.
FORMATS = {
    "FP8": "fp8",
    "delayed": "fp8 delayed",
    "1x128": "blocks 1x128",
    "128x128": "blocks 128x128",
    "MXFP8": "mxfp8",
    "32x32": "mxfp8 32x32",
    "NVFP4": "nvfp4",
    "RHT": "nvfp4 rht",
    "16x16": "nvfp4 16x16",
    "hybrid": "hybrid mxfp8 nvfp4",
    "identity": "identity",
}


def table() -> str:
    known = {case.name: case for case in CASES}
    return writes.table({name: known[case] for name, case in FORMATS.items()})


if __name__ == "__main__":
    sys.exit(main("writes.md", "make_writes_table.py", table, __doc__))
