"""Tables in Markdown, of the rows that a benchmark measured. Each program prints its own; `bench.page` writes them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Cell = str | Callable[[Row], str]
"""A format of a row's fields, or what makes the text of a row."""


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table, with numbers to the right."""
    rows = [heads, ["---" if index == 0 else "---:" for index in range(len(heads))], *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def text(cell: Cell, row: Row) -> str:
    """Return one cell."""
    return cell.format(**row) if isinstance(cell, str) else cell(row)


def table(columns: Mapping[str, Cell], rows: Iterable[Row]) -> str:
    """Return one line for each row."""
    return markdown(list(columns), ([text(cell, row) for cell in columns.values()] for row in rows))


def pivot(rows: Iterable[Row], line: Cell, column: Cell, cell: Cell, corner: str = "") -> str:
    """Return one cell for each row, in the line and the column that its fields say."""
    lines: dict[str, dict[str, str]] = {}
    heads: dict[str, None] = {}
    for row in rows:
        head = text(column, row)
        heads[head] = None
        lines.setdefault(text(line, row), {})[head] = text(cell, row)
    return markdown(
        [corner, *heads], ([name, *(cells.get(head, "") for head in heads)] for name, cells in lines.items())
    )
