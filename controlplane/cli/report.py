"""`rolloutctl report`: one page about one recorded run, to be opened from disk, mailed, or kept beside a checkpoint."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import click

from controlplane.log import RunLog
from controlplane.report.gathering import gather
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
    with _whole(out, force) as page:
        gathered = gather(RunLog.read(file))
        write_page(page, gathered, header.run, file.name)
    click.echo(f"{out}: {gathered.verdict}")
    if gathered.damage:
        click.echo(f"rolloutctl: the page shows what could be read. {gathered.damage}", err=True)
        click.get_current_context().exit(1)


@contextmanager
def _whole(out: Path, force: bool) -> Iterator[TextIO]:
    """A file that is there when the block has ended well, whole, and not at all otherwise.

    Raises ConfigError for a file that is there already, unless `force`, and for a place that can't be written to.
    """
    if out.is_dir():
        raise ConfigError(f"{out} is a folder, and nothing was written: name a file")
    if os.path.lexists(out) and not force:
        raise ConfigError(f"{out} is there already, and nothing was written: name another file, or say --force")
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8") as page:
            yield page
            page.flush()
            os.fsync(page.fileno())
        if force:
            draft.replace(out)
        else:
            os.link(draft, out)  # unlike a rename, never over a file that came to be meanwhile
    except OSError as error:
        raise ConfigError(f"the page can't be written to {out}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
