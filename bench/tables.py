"""What each benchmark begins and ends with: its options, and its rows as a table in Markdown and as JSON."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
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


def read_options(about: str | None, **defaults: Any) -> Any:
    """Read the options of a benchmark, and `--out`: the file that gets its rows.

    Args:
        about: What `--help` says.
        defaults: Of each option, by its name. An option has the type of its default; False is that of a switch.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def publish(shown: str, rows: Sequence[Row], out: Path | None) -> None:
    """Print a table, and write its rows."""
    print(shown)  # noqa: T201
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")
