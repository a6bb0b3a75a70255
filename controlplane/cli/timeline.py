"""`rolloutctl timeline`: a recorded run and its traces as one file for Perfetto."""

from pathlib import Path

import click

from controlplane.cli.command_line import FOLDER, Command, file_argument, force_option, json_option
from controlplane.timeline.perfetto import write_timeline
from schemas.formatting import json_text, one_line, printable


@click.command(cls=Command, short_help="Merge a run and its traces into one file for Perfetto.")
@file_argument
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Output file; compressed if its name ends with .gz.  [default: FILE's name with .perfetto.json.gz]",
)
@click.option(
    "--traces",
    "roots",
    type=FOLDER,
    multiple=True,
    help="Folder below which agents put their traces, or a copy of it. Repeatable.  [default: traces/ beside FILE]",
)
@click.option("--no-traces", is_flag=True, help="Leave out the traces.")
@force_option
@json_option
def timeline(
    file: Path, out: Path | None, roots: tuple[Path, ...], no_traces: bool, force: bool, as_json: bool
) -> None:
    """Draw what the bus and each agent did, merged with the torch traces of engines and ranks, on the bus's clock.

    Open the result at https://ui.perfetto.dev or in any viewer of Chrome's trace events. Each trace that the log names
    is searched for in the folder `traces` beside it, or below the --traces folders, and compared by size and sha256.
    Missing and different files are named and left out. For each agent, the offset of its clock and the bound of the
    error are printed.

    The exit code is 1 if the log can't be read to its end; the timeline then shows everything before that.

    \b
      rolloutctl timeline run.db
      rolloutctl timeline run.db -o run.perfetto.json.gz --traces /mnt/node0/traces --traces /mnt/node1/traces
    """
    if roots and no_traces:
        raise click.UsageError("--traces and --no-traces exclude each other")
    out = out or file.with_name(f"{file.stem}.perfetto.json.gz")
    beside = file.with_name("traces")
    searched = None if no_traces else roots or ((beside,) if beside.is_dir() else ())
    written = write_timeline(file, out, searched, force=force, say=lambda text: click.echo(printable(text), err=True))
    if as_json:
        click.echo(json_text(written))
    else:
        for line in (*written.clocks, *(f"warning: {warning}" for warning in written.warnings)):
            click.echo(one_line(str(line)))
        events = (
            f"{written.control_events} events of the log and {written.traced_events} of {len(written.traces)} traces"
        )
        click.echo(one_line(f"{written.path}: run {written.run}, {events}, {written.nbytes} bytes"))
    if roots and not written.traces:
        click.echo("rolloutctl: none of the traces that the log names is below --traces", err=True)
    if not written.whole or (roots and not written.traces):
        click.get_current_context().exit(1)
