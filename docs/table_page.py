"""Pages of this folder that hold a table made from the code: the scripts `make_*_table.py` write or compare them."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
END = "<!-- end of table -->\n"


def main(page_name: str, script: str, table: Callable[[], str], description: str | None) -> int:
    """Puts ``table()`` between the marks of the page; with ``--check`` returns 1 where it is another one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not current")
    check = parser.parse_args().check
    begin = f"<!-- table: docs/{script} -->\n"
    path = HERE / page_name
    page = path.read_text(encoding="utf-8")
    head, rest = page.split(begin)
    _, tail = rest.split(END)
    current = head + begin + table() + END + tail
    if current == page:
        return 0
    if check:
        print(f"{path} is not current; run python docs/{script}", file=sys.stderr)
        return 1
    path.write_text(current, encoding="utf-8")
    return 0
