"""Checks what viewers of trace events rely on: well-formed events, nested slices, bound arrows, plausible times."""

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from controlplane.timeline.perfetto import Timeline, write_timeline

Event = dict[str, Any]

NEEDS = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts"},
    "M": {"name", "pid", "args"},
}
NAMES = {
    "process_name": str,
    "thread_name": str,
    "process_labels": str,
    "process_sort_index": int,
    "thread_sort_index": int,
}
HOURS_US = 24 * 3600 * 1e6


def read(path: Path) -> dict[str, Any]:
    """Load a file. Numbers with a fraction are exact."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return found


def checked_timeline(log: Path, *roots: Path) -> tuple[Timeline, list[Event]]:
    """Write a timeline. Returns what was written, and its events, which are well-formed."""
    out = log.with_suffix(".perfetto.json.gz")
    written = write_timeline(log, out, roots)
    events: list[Event] = read(out)["traceEvents"]
    wrong = problems(events)
    assert not wrong, "\n".join(wrong[:20])
    assert written.control_events + written.traced_events <= len(events)
    return written, events


def problems(events: list[Event]) -> list[str]:
    """Return everything that is wrong."""
    return [*_malformed(events), *_not_nested(events), *_unbound(events), *_unnamed(events), *_empty(events)]


def _malformed(events: list[Event]) -> list[str]:
    found = []
    for event in events:
        kind = event.get("ph")
        lacks = NEEDS.get(str(kind), {f"a known kind, not {kind}"}) - event.keys()
        if lacks:
            found.append(f"{event} lacks {', '.join(sorted(lacks))}")
        if not 0 <= event.get("ts", 0) < HOURS_US:
            found.append(f"{event} is at {event['ts']}")
        if event.get("dur", 0) < 0:
            found.append(f"{event} ends before it begins")
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid", 0), int):
            found.append(f"{event} has a pid or tid that is no number")
        if kind == "C" and not all(isinstance(value, int | Decimal) for value in event["args"].values()):
            found.append(f"{event} counts what is no number")
        if kind == "M" and not _is_name(event["name"], next(iter(event["args"].values()))):
            found.append(f"{event} is no name")
    return found


def _is_name(kind: str, value: object) -> bool:
    return isinstance(value, NAMES[kind]) and value != ""


def _not_nested(events: list[Event]) -> list[str]:
    """On one thread a slice lies inside another or beside it."""
    found = []
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        around: list[Decimal] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            ts, end = Decimal(str(event["ts"])), Decimal(str(event["ts"])) + Decimal(str(event["dur"]))
            while around and around[-1] <= ts:
                around.pop()
            if around and end > around[-1]:
                found.append(f"{event} outlasts the slice around it, which ends at {around[-1]}")
            around.append(end)
    return found


def _unbound(events: list[Event]) -> list[str]:
    """An arrow has two ends in order, and each lies in a slice."""
    ends: dict[object, dict[str, Event]] = defaultdict(dict)
    slices = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]][event["ph"]] = event
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    found = []
    for arrow, both in ends.items():
        if both.keys() != {"s", "f"}:
            found.append(f"arrow {arrow} has one end only: {list(both)}")
        elif both["f"]["ts"] < both["s"]["ts"]:
            found.append(f"arrow {arrow} leads back in time")
        found += [
            f"{end} lies in no slice"
            for end in both.values()
            if not any(begin <= end["ts"] <= until for begin, until in slices[end["pid"], end["tid"]])
        ]
    return found


def _unnamed(events: list[Event]) -> list[str]:
    named: dict[str, set[object]] = {"process_name": set(), "thread_name": set()}
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            named[event["name"]].add(key)
    processes = {event["pid"] for event in events} - named["process_name"]
    threads = _tracks(events) - named["thread_name"]
    return [f"process {pid} has no name" for pid in processes] + [f"thread {tid} has no name" for tid in threads]


def _tracks(events: list[Event]) -> set[tuple[int, int]]:
    """Threads that have a track: with a slice, or a mark that is not one of the whole process."""
    return {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi" and event.get("s") != "p"}


def _empty(events: list[Event]) -> list[str]:
    """A process or thread that has a name has an event, and no two processes have the same name."""
    drawn = _tracks(events)
    processes = {event["pid"] for event in events if event["ph"] in "XiC"}
    names: dict[object, object] = {}
    found = []
    for event in events:
        if event["name"] == "process_name" and event["ph"] == "M":
            found += [f"{event} names a process without events"] * (event["pid"] not in processes)
            found += [f"{event} names a second process"] * (
                names.setdefault(event["args"]["name"], event["pid"]) != event["pid"]
            )
        if event["name"] == "thread_name" and (event["pid"], event["tid"]) not in drawn:
            found.append(f"{event} names a thread without events")
    return found
