"""`rolloutctl log prune` and `archive`: keep a recorded run small, or put it away."""

from pathlib import Path

import click

from controlplane.cli.command_line import Command
from controlplane.record.archive import write_archive
from controlplane.record.log import RunLog
from schemas.errors import ConfigError
from schemas.identity import NUMBER_MAX

_file = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.command(cls=Command, short_help="Drop the oldest records.")
@_file
@click.option("--before", type=click.IntRange(1, NUMBER_MAX), help="Keep the records from this position on.")
@click.option("--days", type=click.FloatRange(0, 36_500), help="Drop records that are older.")
@click.option(
    "--megabytes", type=click.FloatRange(0.1, 1e9), help="Drop the oldest records until the log is of this size."
)
def prune(file: Path, before: int | None, days: float | None, megabytes: float | None) -> None:
    """Drop the oldest records of a log, up to a mark, with which it then begins. It can be replayed and continued.

    Nothing is dropped after the newest mark: the bus makes one every 8,192 records or so. While a bus writes the log,
    use `log_bytes_max` or `log_age_max_s` in its BusConfig instead.
    """
    if (before is None) + (days is None) + (megabytes is None) != 2:
        raise ConfigError("say what to keep, with one of --before, --days and --megabytes; nothing was dropped")
    size = file.stat().st_size
    dropped = RunLog.prune(
        file,
        before=before,
        age_max_s=None if days is None else int(days * 86_400),
        bytes_max=None if megabytes is None else int(megabytes * 1e6),
    )
    if not dropped:
        click.echo(f"{file}: nothing was dropped, because there is nothing to drop before a mark")
        return
    click.echo(f"{file}: {dropped} records dropped, {size:,} bytes before and {file.stat().st_size:,} now")


@click.command(cls=Command, short_help="Write a compressed copy.")
@_file
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def archive(file: Path, out: Path | None, force: bool) -> None:
    """Write a compressed copy of a log, which every command reads as it is; `gunzip` makes a log of it again.

    The log stays, and a bus may write it meanwhile: the copy has everything up to one moment.
    """
    out = out or file.with_name(f"{file.name}.gz")
    RunLog.header(file)
    size = write_archive(file, out, force)
    click.echo(f"{out}: {size:,} bytes, of {file.stat().st_size:,}")
