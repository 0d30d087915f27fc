"""Tables as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence


def as_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns beside each other, the last one as wide as it likes."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def as_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A ``<table>``; what stands in it is escaped."""
    lines = [_row("th", header), *(_row("td", row) for row in rows)]
    return "<table>" + "".join(lines) + "</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    import html

    style = ' style="text-align: left"'
    return "<tr>" + "".join(f"<{tag}{style}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
