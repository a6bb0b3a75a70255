"""`rolloutctl log prune`, `archive` and `export`: keep a recorded run small, put it away, or hand it to other tools."""

from collections.abc import Iterable
from pathlib import Path
from typing import IO

import click
import msgspec

from controlplane.cli.command_line import Command
from controlplane.record.archive import write_archive
from controlplane.record.atomic_write import atomic_write, check_destination
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.record.log_lines import json_line
from schemas.errors import ConfigError, LogError
from schemas.identity import NUMBER_MAX

PARQUET_ROWS = 16_384
"""Rows in a group of a Parquet file, which are in memory at once."""

_file = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_out = click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
_force = click.option("--force", is_flag=True, help="Replace an existing file.")


@click.command(cls=Command, short_help="Drop the oldest records.")
@_file
@click.option("--before", type=click.IntRange(1, NUMBER_MAX), help="Keep the records from this position on.")
@click.option("--days", type=click.FloatRange(0, 36_500), help="Drop records that are older.")
@click.option("--megabytes", type=click.FloatRange(0.1, 1e9), help="Drop what is too much.")
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
@_out
@_force
def archive(file: Path, out: Path | None, force: bool) -> None:
    """Write a compressed copy of a log, which every command reads as it is; `gunzip` makes a log of it again.

    The log stays, and a bus may write it meanwhile: the copy has everything up to one moment.
    """
    out = out or file.with_name(f"{file.name}.gz")
    RunLog.header(file)
    size = write_archive(file, out, force)
    click.echo(f"{out}: {size:,} bytes, of {file.stat().st_size:,}")


@click.command(cls=Command, short_help="Write every decision for other tools.")
@_file
@_out
@_force
@click.option("--format", "kind", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
def export(file: Path, out: Path | None, force: bool, kind: str) -> None:
    """Write every decision: lines of JSON as `log show --json` prints them, or a Parquet file (needs pyarrow)."""
    out = out or file.with_suffix(f".{kind}")
    RunLog.header(file)
    check_destination(out, force, [file])
    try:
        with atomic_write(out, force) as stream:
            count = _write_parquet(stream, file) if kind == "parquet" else _write_lines(stream, RunLog.read(file))
    except OSError as error:
        raise LogError(f"{out} was not written: {error.strerror or error}") from error
    click.echo(f"{out}: {count} decisions")


def _write_lines(stream: IO[bytes], entries: Iterable[LogEntry]) -> int:
    count = 0
    for count, entry in enumerate(entries, start=1):  # noqa: B007
        stream.write(json_line(entry) + b"\n")
    return count


def _write_parquet(stream: IO[bytes], file: Path) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "--format parquet needs pyarrow, which is not installed; nothing was written. Install it with "
            "`pip install pyarrow`, or use --format jsonl"
        ) from None
    text, number = pyarrow.string(), pyarrow.int64()
    columns = {"position": number, "at_ns": number, "agent": text, "kind": text, "journal": text, "number": number}
    schema = pyarrow.schema(list({**columns, "event": text, "effects": text}.items()))
    rows: list[dict[str, object]] = []
    count = 0
    with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        for count, entry in enumerate(RunLog.read(file), start=1):  # noqa: B007
            fields = msgspec.json.decode(json_line(entry), type=dict[str, msgspec.Raw])
            rows.append(
                {
                    **{name: getattr(entry, name) for name in columns},
                    "event": bytes(fields["event"]).decode(),
                    "effects": bytes(fields["effects"]).decode(),
                }
            )
            if len(rows) == PARQUET_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows.clear()
        writer.write_table(pyarrow.Table.from_pylist(rows, schema))
    return count
