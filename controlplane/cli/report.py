"""`rolloutctl report`: one HTML page about one recorded run."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import click

from controlplane.cli.command_line import PATH, Command, file_argument, force_option
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.report.page import write_page
from schemas.errors import ConfigError
from schemas.formatting import one_line, printable
from schemas.storage.atomic_write import atomic_write, check_destination


@click.command(cls=Command, short_help="Write one page about a recorded run.")
@file_argument
@click.option("-o", "--out", type=PATH, help="The page.  [default: beside FILE, as .html]")
@force_option
def report(file: Path, out: Path | None, force: bool) -> None:
    """Write one page about a recorded run: what went wrong, then the fleet, every command, each replica over time,
    latencies and stragglers. The page needs no network. The run may still be running.

    The exit code is 1 if the log can't be read to its end; the page then shows everything that can be read.
    """
    out = out or file.with_suffix(".html")
    header = RunLog.header(file)
    check_destination(out, force, [file])
    with _page(out, force) as page:
        collected = collect(RunLog.walk(file))
        write_page(page, collected, header.run, file.name)
    click.echo(one_line(f"{out}: {collected.verdict}"))
    if collected.damage:
        click.echo(printable(f"rolloutctl: the page shows only what could be read. {collected.damage}"), err=True)
        click.get_current_context().exit(1)


@contextmanager
def _page(out: Path, force: bool) -> Iterator[TextIO]:
    """A text file that appears when it is complete. Raises ConfigError if it can't be written."""
    try:
        with atomic_write(out, force) as file:
            page = TextIOWrapper(file, encoding="utf-8", write_through=True)
            yield page
            page.detach()
    except OSError as error:
        raise ConfigError(f"the page can't be written to {out}: {error.strerror or error}") from error
