"""`rolloutctl timeline`: a recorded run and the traces that it names, as one file for Perfetto."""

from pathlib import Path

import click
import msgspec

from controlplane.timeline.perfetto import Timeline, write_timeline


@click.command(short_help="A run and its traces in one file for Perfetto.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; compressed if it ends with .gz.  [default: FILE's name with .perfetto.json.gz]",
)
@click.option(
    "--traces",
    "roots",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    help="Root below which agents put their traces, or a copy of it. Once for each.",
)
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print for machines.")
def timeline(file: Path, out: Path | None, roots: tuple[Path, ...], force: bool, as_json: bool) -> None:
    """Draw what the bus and each agent did, merged with the torch traces of engines and ranks, on the bus's clock.

    Open the result at https://ui.perfetto.dev or in any viewer of Chrome's trace events. Each trace that the log names
    is looked for below the roots and compared with its size and sha256. What is missing or another file is named, and
    left out. Printed for each agent: how far its clock was from the bus's, and by how much that may be wrong.

    Ends with 1 if the log could not be read to its end: what could is drawn.

    \b
      rolloutctl timeline run.db -o run.perfetto.json.gz --traces /mnt/node0/traces --traces /mnt/node1/traces
    """
    out = out or file.with_name(f"{file.stem}.perfetto.json.gz")
    written = write_timeline(file, out, roots, force=force, say=lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(msgspec.json.encode(written))
    else:
        _tell(written)
    if not written.whole:
        click.get_current_context().exit(1)


def _tell(written: Timeline) -> None:
    for clock in written.clocks:
        click.echo(str(clock))
    for warning in written.warnings:
        click.echo(f"warning: {warning}")
    click.echo(
        f"{written.path}: run {written.run}, {written.control_events} events of the log and {written.traced_events} of "
        f"{len(written.traces)} traces, {written.nbytes} bytes"
    )
