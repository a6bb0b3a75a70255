"""The screen of `rolloutctl top`: what it shows of a fleet, and what each key does. Pure."""

import re
from collections.abc import Iterable
from textwrap import wrap
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Group
from rich.table import Table
from rich.text import Text

from schemas.commands import EngineCommand, Target
from schemas.formatting import one_line
from schemas.identity import ROLLOUT, identity_of
from schemas.reports import INSECURE, AgentLine, FleetStatus, Report

KEYS: Final = "↑↓ replica  a all  p pause  r resume  q quit"
KEYS_READ_ONLY: Final = "↑↓ replica  a all  q quit   this key may read, and not command"
READ_ONLY: Final = "this is an observer's key: it may read the status, and not command. Nothing was sent"
WIDE: Final = 120
"""Columns from which on hosts and engines are shown."""
LINES_MAX: Final = 4
"""Lines of each list below the table."""
ROWS_MIN: Final = 3
_ESCAPES: Final = {
    **{"\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down"},
    **{"\r": "enter", "\n": "enter", "\x1b": "escape"},
}

Question = Literal["pause", "resume"]

QUESTIONS: Final[dict[str, Question]] = {"p": "pause", "r": "resume"}


class Confirmed(Struct, frozen=True):
    """A command that the operator has confirmed."""

    command: EngineCommand
    target: Target


class TopView(Struct, frozen=True, kw_only=True):
    """What the operator has chosen and was told.

    Attributes:
        replica: The selected one; None for all.
        question: A command that waits to be confirmed.
        trouble: Whether it ended badly.
        silent: Why the bus did not answer last time; empty if it did.
    """

    replica: int | None = None
    question: Question | None = None
    message: tuple[str, ...] = ()
    trouble: bool = False
    silent: str = ""
    over: bool = False


# --- keys -------------------------------------------------------------------------------------------------------------


def keys_in(text: str) -> list[str]:
    """Return the keys that a terminal sent, those without a character by name: `up`, `enter`."""
    return [_ESCAPES.get(key, key) for key in re.findall(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", text, re.DOTALL)]


def press(view: TopView, key: str, fleet: FleetStatus) -> tuple[TopView, Confirmed | None]:
    """Return what a key makes of the view, and the command that it confirms."""
    if view.question is not None:
        return _answer(view, view.question, key)
    if key == "q":
        return replace(view, over=True), None
    if key in ("up", "k", "down", "j"):
        return replace(view, replica=_neighbour(fleet, view.replica, 1 if key in ("down", "j") else -1)), None
    if key in ("a", "escape"):
        return replace(view, replica=None), None
    if key not in QUESTIONS:
        return view, None
    if fleet.read_only:
        return replace(view, message=(READ_ONLY,), trouble=True), None
    return replace(view, question=QUESTIONS[key]), None


def _answer(view: TopView, question: Question, key: str) -> tuple[TopView, Confirmed | None]:
    view = replace(view, question=None)
    if key != "enter":
        return replace(view, message=("nothing was sent",), trouble=False), None
    target = Target(replicas=None if view.replica is None else frozenset([view.replica]))
    order = Confirmed(EngineCommand(operation=question), target)
    return replace(view, message=(f"{question}: sent",), trouble=False), order


def _neighbour(fleet: FleetStatus, replica: int | None, by: int) -> int | None:
    """The next replica in the order of the screen."""
    order = list(dict.fromkeys(found for line in fleet.agents if (found := _replica(line)) is not None))
    if not order:
        return None
    if replica not in order:
        return order[0 if by > 0 else -1]
    return order[max(0, min(order.index(replica) + by, len(order) - 1))]


def _replica(line: AgentLine) -> int | None:
    """None for a training rank."""
    identity = identity_of(line.agent)
    return identity.replica if identity.role == ROLLOUT else None


def summary_of(report: Report) -> tuple[tuple[str, ...], bool]:
    """Return what the screen says about a report, and whether it is bad news."""
    lines = [line.text for line in report.lines()]
    more = [f"  … {len(lines) - LINES_MAX + 1} more lines"] if len(lines) > LINES_MAX else []
    shown = lines[: LINES_MAX - len(more)]
    return (*shown, *more), bool(report.failed or report.missing or report.matched_nothing)


# --- the screen -------------------------------------------------------------------------------------------------------


def top_screen(fleet: FleetStatus, view: TopView, width: int, height: int) -> Group:
    """Return the fleet as it fills a terminal, agents in trouble first, the keys in the last line."""
    head = [_line(_headline(fleet), "bold")]
    head += [_line(INSECURE, "bold red")] if fleet.insecure else []
    head += [_line(text, "red") for text in (view.silent, *fleet.warnings) if text]
    said = [part for text in view.message[:LINES_MAX] for part in wrap(one_line(text), width)]
    foot = [_line(text, "red" if view.trouble else "green") for text in said[: 2 * LINES_MAX]]
    foot += [_line(_asked(view), "bold yellow")] if view.question is not None else []
    foot += [_line(_keys_line(fleet, view, width), "reverse")]
    room = height - len(head) - len(foot) - 1
    lists = [
        *_selected_lines(fleet, view, width),
        *_list(fleet.served_lines, "cyan"),
        *_list([f"open: {text}" for text in fleet.open_lines], "yellow"),
        *_list([each.line for each in fleet.failures], "red"),
    ]
    lists = lists[: max(0, room - min(len(fleet.agents), ROWS_MIN))]
    table, rows = _agents(fleet, view, width, max(1, room - len(lists)))
    return Group(*head, table, *lists, *[Text("")] * (room - rows - len(lists)), *foot)


def _headline(fleet: FleetStatus) -> str:
    troubled = sum(line.in_trouble for line in fleet.agents)
    state = f", {troubled} in trouble" if troubled else ""
    agents = f"{len(fleet.agents)} agent{'' if len(fleet.agents) == 1 else 's'}{state}"
    return f"{agents}, {fleet.weights}, run {fleet.run}, epoch {fleet.epoch}, seq {fleet.seq}"


def _asked(view: TopView) -> str:
    target = "all replicas" if view.replica is None else f"replica {view.replica}"
    what = " (running requests are aborted)" if view.question == "pause" else ""
    return f"{view.question} {target}{what}?  Enter: yes, other keys: no"


def _keys_line(fleet: FleetStatus, view: TopView, width: int) -> str:
    keys = KEYS_READ_ONLY if fleet.read_only else KEYS
    return f"{keys}   [{'all' if view.replica is None else f'replica {view.replica}'}]".ljust(width)


def _selected_lines(fleet: FleetStatus, view: TopView, width: int) -> list[Text]:
    """All about the agents of the selected replica."""
    texts: list[str] = []
    for line in fleet.agents:
        if _is_selected(line, view):
            engine = f", {line.status.engine}" if line.status is not None else ""
            waits = f"; waits for {'; '.join(line.waits_for)}" if line.waits_for else ""
            texts += wrap(
                one_line(f"{line.agent} on {line.host}{engine}: {line.condition}{line.in_flight}{waits}"), width
            )
    return _list(texts, "bold", 2 * LINES_MAX)


def _list(texts: list[str], style: str, lines_max: int = LINES_MAX) -> list[Text]:
    more = [f"… {len(texts) - lines_max + 1} more"] if len(texts) > lines_max else []
    return [_line(text, style) for text in (*texts[: lines_max - len(more)], *more)]


def _agents(fleet: FleetStatus, view: TopView, width: int, room: int) -> tuple[Table, int]:
    """The table, in at most `room` lines below its head; and how many lines it has."""
    table = Table(box=None, pad_edge=False, expand=True, header_style="bold", show_edge=False)
    table.add_column("", width=1)
    for name in ("agent", "serves"):
        table.add_column(name, no_wrap=True)
    table.add_column("condition", no_wrap=True, overflow="ellipsis", ratio=5)
    table.add_column("waits for", no_wrap=True, overflow="ellipsis", ratio=3)
    for name in ("answered in", "silent"):
        table.add_column(name, no_wrap=True, justify="right")
    if width >= WIDE:
        table.add_column("host", no_wrap=True, overflow="ellipsis", ratio=2)
        table.add_column("engine", no_wrap=True, overflow="ellipsis", ratio=2)
    shown = fleet.agents
    if len(shown) > room:
        first = next((at for at, line in enumerate(shown) if _is_selected(line, view)), 0)
        first = min(first, len(shown) - room + 1) if first >= room - 1 else 0
        shown = shown[first : first + room - 1]
    for line in shown:
        colour = "red" if line.in_trouble else "yellow" if line.waits_for else ""
        style = f"{'reverse ' if _is_selected(line, view) else ''}{colour}".strip()
        table.add_row(*_cells(line, view, width), style=style)
    if hidden := len(fleet.agents) - len(shown):
        table.add_row("", "…", "", f"{hidden} more agents", *[""] * (len(table.columns) - 4), style="dim")
    return table, len(table.rows)


def _cells(line: AgentLine, view: TopView, width: int) -> Iterable[Text]:
    here = line.state in ("joining", "live")
    yield Text(">" if _is_selected(line, view) else "!" if line.in_trouble else "")
    yield Text(line.agent)
    yield Text(f"v{line.serving}" if line.serving is not None else "-")
    yield _line(f"{line.condition}{line.in_flight}")
    yield _line("; ".join(line.waits_for) or "-")
    yield Text(_format_latency(line.latency_us) if line.latency_us is not None and here else "-")
    yield Text(f"{line.silent_ms / 1000:.1f} s" if here else "-")
    if width >= WIDE:
        yield _line(line.host)
        yield _line(line.status.engine if line.status is not None else "-")


def _is_selected(line: AgentLine, view: TopView) -> bool:
    return view.replica is not None and view.replica == _replica(line)


def _format_latency(latency_us: int) -> str:
    return f"{latency_us / 1000:.1f} ms" if latency_us < 1_000_000 else f"{latency_us / 1_000_000:.1f} s"


def _line(text: str, style: str = "") -> Text:
    """A text of others, or ours, in one row."""
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")
