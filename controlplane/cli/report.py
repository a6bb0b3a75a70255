"""`rolloutctl report`: one page about one recorded run, to be opened from disk, mailed, or kept beside a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import click

from controlplane.record.atomic_write import atomic_write, check_destination
from controlplane.record.log import RunLog
from controlplane.report.collect import gather
from controlplane.report.page import write_page
from schemas.errors import ConfigError


@click.command(short_help="One page about a recorded run.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The page.  [default: beside FILE, as .html]")
@click.option("--force", is_flag=True, help="Replace the page if it is there already.")
def report(file: Path, out: Path | None, force: bool) -> None:
    """Write one page that shows what went wrong in a recorded run, then everything else: the fleet, every command,
    weight versions and pauses over time, latencies, stragglers. It needs no network. The run may still go on.

    Ends with 1 if the log could not be read to its end: the page then shows what could.
    """
    out = out or file.with_suffix(".html")
    header = RunLog.header(file)
    check_destination(out, force, [file])
    with _page(out, force) as page:
        gathered = gather(RunLog.read(file))
        write_page(page, gathered, header.run, file.name)
    click.echo(f"{out}: {gathered.verdict}")
    if gathered.damage:
        click.echo(f"rolloutctl: the page shows what could be read. {gathered.damage}", err=True)
        click.get_current_context().exit(1)


@contextmanager
def _page(out: Path, force: bool) -> Iterator[TextIO]:
    """The text of a whole file. Raises ConfigError for a place that can't be written to."""
    try:
        with atomic_write(out, force) as file:
            page = TextIOWrapper(file, encoding="utf-8", write_through=True)
            yield page
            page.detach()
    except OSError as error:
        raise ConfigError(f"the page can't be written to {out}: {error.strerror or error}") from error
