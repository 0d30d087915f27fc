"""The pages that are made from the code are current."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "make_formats_table.py"


def test_the_table_of_formats_is_current() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
