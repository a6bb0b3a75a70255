"""`rolloutctl simulate`: what a policy would cost a fleet, by the machines that would decide."""

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import click
from rich.table import Table

from controlplane.cli.command_line import FILE, Command, json_option
from controlplane.cli.tables import Screen, new_table
from controlplane.record.log import RunLog
from controlplane.simulate.cost_plot import plot as drawn
from controlplane.simulate.costs import RunCosts
from controlplane.simulate.fit import fit
from controlplane.simulate.fleet_model import Tree, checked, merged, varied
from controlplane.simulate.simulator import simulate as run
from schemas.errors import ConfigError
from schemas.formatting import json_text, markup
from schemas.profiler.conversion import read_toml

COLUMNS: Final = (
    *("hours", "sync p50", "sync p99", "aborted", "left out", "behind"),
    *("GPU-hours", "lost", "paused", "quarantined", "down"),
)


@click.command(cls=Command, short_help="Estimate what a policy would cost a fleet.")
@click.argument("model", type=FILE, required=False)
@click.option(
    "--from", "log", type=FILE, help="Fit the model to a recorded run. MODEL, if given, changes what it says."
)
@click.option("--vary", multiple=True, metavar="KEY=A,B,…", help="Simulate once for each value. Repeat for a grid.")
@json_option
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the GPU time lost, as an SVG.")
def simulate(model: Path | None, log: Path | None, vary: tuple[str, ...], as_json: bool, plot: Path | None) -> None:
    """Simulate the fleet of MODEL: time of its syncs, how many are aborted, and which GPU time is lost to them.

    KEY is a key of `policy`, or a path such as fleet.replicas or calls.load.

    \b
      rolloutctl simulate fleet.toml --vary quorum=all,3,1
      rolloutctl simulate --from run.db --vary absent=skip,wait --vary in_flight=abort,wait
    """
    if model is None and log is None:
        raise click.UsageError("name a MODEL, or a recorded run by --from")
    tree: Tree = {}
    rows: list[tuple[str, RunCosts]] = []
    if log is not None:
        RunLog.check_logic(log)
        tree, recorded = fit(RunLog.walk(log))
        rows.append(("recorded", recorded))
    if model is not None:
        tree = merged(tree, read_toml(model.read_text("utf-8"), str(model)))
    grid = _grid(tree, vary)
    models = [checked(each, str(model or log)) for each in grid.values()]
    if len(models) == 1:
        costs = [run(models[0])]
    else:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
            costs = list(processes.map(run, models))
    rows += zip(grid, costs, strict=True)
    if plot is not None:
        try:
            plot.write_text(drawn(rows), "utf-8")
        except OSError as error:
            raise ConfigError(f"the picture can't be written to {plot}: {error.strerror}") from error
    if as_json:
        click.echo(json_text([{"run": label, "costs": each} for label, each in rows]))
    else:
        Screen().show(_table(rows))
        if len(grid) > 1:
            best, costs_of_best = min(zip(grid, costs, strict=True), key=lambda row: row[1].lost_share)
            click.echo(f"Least GPU time lost: {best} ({costs_of_best.lost_share:.0%})")


def _grid(tree: Tree, vary: tuple[str, ...]) -> dict[str, Tree]:
    """Return each combination of the values, by its name."""
    axes = []
    for text in vary:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise ConfigError(f"--vary {text!r}: expected KEY=A,B,… such as quorum=all,3,1")
        axes.append([(key, value.strip()) for value in values.split(",")])
    grid: dict[str, Tree] = {}
    for choice in product(*axes):
        each = tree
        for key, value in choice:
            each = varied(each, key, value)
        grid[", ".join(f"{key}={value}" for key, value in choice) or "simulated"] = each
    return grid


def _table(rows: list[tuple[str, RunCosts]]) -> Table:
    table = new_table(("run", *COLUMNS), COLUMNS)
    for label, costs in rows:
        table.add_row(
            *(markup(label), _number(costs.hours), f"{costs.sync_p50:.2f} s", f"{costs.sync_p99:.2f} s"),
            *(f"{costs.aborted} of {costs.syncs}", f"{costs.left_out:.2f}", f"{costs.behind:.2f}"),
            *(_number(costs.gpu_hours), f"{_number(costs.lost)} ({costs.lost_share:.0%})"),
            *map(_number, (costs.paused, costs.quarantined, costs.down)),
        )
    return table


def _number(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 1 else f"{hours:.2g}"
