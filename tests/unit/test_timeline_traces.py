"""Torch traces in a timeline: found, checked, placed on the bus's clock, kept apart; and streamed."""

import gzip
import hashlib
import json
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec import structs

from controlplane.timeline.perfetto import Timeline, write_timeline
from schemas.identity import Identity
from schemas.outcomes import Acted, Trace
from tests.running import python
from tests.timeline.trace_events import Event, problems, read
from tests.timeline.written import MS, Op, Written, placed, torch_trace

PRIMARY = Identity(replica=0, node_rank=0, nnodes=2, gpus_per_node=2)
SECOND = Identity(replica=0, node_rank=1, nnodes=2, gpus_per_node=2)
ACTOR = Identity(replica=3, node_rank=0, role="actor")
OPS = [Op("aten::mm", 60, 10), Op("aten::add", 61, 2), Op("gemm", 65, 3, pid=0, tid=7)]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run.db")


def merged(log: Path, *roots: Path) -> tuple[Timeline, list[Event]]:
    """The timeline, and the events that came from traces. All of them are well formed."""
    out = log.with_suffix(".perfetto.json.gz")
    told = write_timeline(log, out, roots)
    events: list[Event] = read(out)["traceEvents"]
    assert problems(events) == []
    return told, [event for event in events if event["pid"] > 100_000]


def ops(events: list[Event]) -> dict[str, tuple[Decimal, Decimal]]:
    return {one["name"]: (Decimal(str(one["ts"])), Decimal(str(one["dur"]))) for one in events if one["ph"] == "X"}


def processes(events: list[Event]) -> list[str]:
    return sorted(one["args"]["name"] for one in events if one["name"] == "process_name")


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("base_last", [False, True])
@pytest.mark.parametrize("offset_ns", [0, -37_000_000_000, 250_000])
def test_a_trace_lies_where_it_was_on_the_buss_clock(
    written: Written, tmp_path: Path, packed: str, base_last: bool, offset_ns: int
) -> None:
    """The node's wall clock is ahead of the bus's by -offset_ns, and so are the times in its traces."""
    peer = written.joins(PRIMARY, clocks=(written.clock(0, offset_ns), written.clock(100, offset_ns)))
    shifted = [Op(op.name, op.at_ms - offset_ns / MS, op.for_ms, op.pid, op.tid) for op in OPS]
    trace = placed(tmp_path / "traces", f"step/a.pt.trace.json{packed}", torch_trace(shifted, base_last=base_last))
    written.profiles(peer, 80, 20, trace)
    told, events = merged(written.close(), tmp_path / "traces")
    assert told.warnings == ()
    # The timeline begins with the start of the agent, at 1 ms. Torch's times end on a quarter of a microsecond.
    assert ops(events) == {
        "aten::mm": (Decimal("59000.25"), Decimal(10_000)),
        "aten::add": (Decimal("60000.25"), Decimal(2_000)),
        "gemm": (Decimal("64000.25"), Decimal(3_000)),
    }
    assert told.traced_events == len(OPS) + 2


def test_slices_that_torch_lets_overlap_are_drawn_all_the_same(written: Written, tmp_path: Path) -> None:
    """With stacks, an annotation begins within the call that made it and outlasts it; a call can outlast its caller."""
    stacked = [
        Op("learn", 61, 8, cat="user_annotation"),
        Op("aten::mm", 62, 1),
        Op("caller", 60, 9.5, cat="python_function"),  # torch writes Python's calls after all others
        Op("enter", 60.5, 1, cat="python_function"),
        Op("callee", 68, 1.75, cat="python_function"),
    ]
    peer = written.joins(PRIMARY, clocks=(written.clock(0), written.clock(100)))
    trace = placed(tmp_path / "traces", "step/a.pt.trace.json.gz", torch_trace(stacked))
    written.profiles(peer, 80, 20, trace)
    _, events = merged(written.close(), tmp_path / "traces")
    lasts = {name: dur for name, (_, dur) in ops(events).items()}
    assert lasts == {"learn": 8000, "aten::mm": 1000, "caller": 9500, "enter": 1000, "callee": 1500}
    threads = {one["name"]: one["tid"] for one in events if one["ph"] == "X"}
    assert len({threads["aten::mm"], threads["caller"], threads["callee"]}) == 1 != threads["learn"]
    named = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert named[threads["learn"]] == "stages (thread 78)"


def test_kernels_that_overlap_on_a_stream_are_drawn_as_long_as_they_were(written: Written, tmp_path: Path) -> None:
    """Each is launched before the one before it has ended; an arrow leads to each, and ends at its beginning."""
    kernels = [Op(f"k{i}", 60 + i, 1.25, pid=0, tid=7, cat="kernel") for i in range(5)]
    whole = torch_trace(
        [one for kernel in kernels for one in (Op("launch", kernel.at_ms - 5, 0.5), kernel)], arrows=True
    )
    said = [("thread_name", {"name": "stream 7 "}), ("thread_sort_index", {"sort_index": 7})]
    names = [json.dumps({"ph": "M", "name": kind, "pid": 0, "tid": 7, "args": args}) for kind, args in said]
    trace = placed(
        tmp_path, "a.trace.json", whole.replace(b'"traceEvents": [', b'"traceEvents": [%s,' % ",".join(names).encode())
    )
    peer = written.joins(PRIMARY, clocks=(written.clock(0), written.clock(100)))
    written.profiles(peer, 80, 20, trace)
    told, events = merged(written.close(), tmp_path)
    assert told.traced_events == 4 + 2 * 2 * len(kernels)
    drawn = {one["name"]: (one["tid"], one["dur"]) for one in events if one.get("cat") == "kernel"}
    assert {dur for _, dur in drawn.values()} == {1250}
    about: dict[str, dict[int, dict[str, object]]] = {"thread_name": {}, "thread_sort_index": {}}
    for one in events:
        if one["name"] in about:
            about[one["name"]][one["tid"]] = one["args"]
    shown = [about["thread_name"][drawn[f"k{i}"][0]]["name"] for i in range(5)]
    assert shown == ["stream 7 ", "stream 7 (2)", "stream 7 ", "stream 7 (2)", "stream 7 "]
    assert {about["thread_sort_index"][tid]["sort_index"] for tid, _ in drawn.values()} == {7}
    assert [one["tid"] for one in events if one["ph"] == "f"] == [drawn[f"k{i}"][0] for i in range(5)]


def test_processes_say_whose_they_are(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    for place, name, rank in ((PRIMARY, "a", 1), (SECOND, "b", None), (ACTOR, "c", 3)):
        peer = written.joins(place, clocks=(written.clock(0),))
        trace = placed(root, f"{name}.pt.trace.json.gz", torch_trace(OPS, rank=rank))
        if place is ACTOR:
            trace = Trace(trace.path, trace.nbytes, trace.sha256, 3)
        front = placed(root, "node.async_llm.9.pt.trace.json.gz", torch_trace([Op("feed", 70, 1)]))
        written.profiles(peer, 80, 20, *((trace, front) if place is PRIMARY else (trace,)))
    _, events = merged(written.close(), root)
    assert processes(events) == [
        *("actor rank 3, step 1: 0", "actor rank 3, step 1: python"),
        "replica 0 front end, step 1: python",
        *("replica 0 rank 0, step 1: 0", "replica 0 rank 0, step 1: python"),
        *("replica 0 rank 1, step 1: 0", "replica 0 rank 1, step 1: python"),
    ]


def test_files_with_the_same_numbers_are_kept_apart(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    for place in (PRIMARY, SECOND):
        peer = written.joins(place, clocks=(written.clock(0),))
        content = torch_trace([*OPS[:2], *OPS[:2]], arrows=True) + b" " * place.node_rank  # another digest
        written.profiles(peer, 80, 20, placed(root, f"{place.node_rank}.trace.json", content))
    told, events = merged(written.close(), root)
    assert len(told.traces) == 2
    assert len({event["pid"] for event in events}) == 2
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) == 4
    assert {one["args"]["Addr"] for one in events if one["ph"] == "X"} == {2**64 - 1}, "large numbers stay exact"


def test_what_is_missing_or_another_file_is_named_and_left_out(written: Written, tmp_path: Path) -> None:
    root, copy = tmp_path / "traces", tmp_path / "copy"
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    good = placed(copy, "good.trace.json", torch_trace(OPS))
    altered = placed(root, "altered.trace.json", torch_trace(OPS[:1]))
    (root / altered.path).write_bytes(torch_trace(OPS[:1]).replace(b"aten::mm", b"aten::xx"))
    longer = placed(root, "longer.trace.json", torch_trace(OPS[1:]))
    (root / longer.path).write_bytes(torch_trace(OPS))
    gone = Trace("gone.trace.json", 5, "ab")
    outside = Trace("../outside.trace.json", 5, "cd")
    written.profiles(peer, 80, 20, good, altered, longer, gone, outside, Trace("memory.pickle", 9, "ef"))
    told, events = merged(written.close(), root, copy)
    assert told.traces == (str(copy / "good.trace.json"),)
    assert len(ops(events)) == 3
    nbytes, seen, said = len(torch_trace(OPS)), f"{_digest(root / altered.path)}…", altered.sha256[:16]
    assert told.warnings == tuple(
        f"left out: the trace {one}"
        for one in (
            f"altered.trace.json: {root / altered.path} has sha256 {seen}, the log says {said}…: another file",
            f"longer.trace.json: {root / longer.path} has {nbytes} bytes, the log says {longer.nbytes}",
            f"gone.trace.json: not found ({root}, {copy})",
            "../outside.trace.json: not a path below a traces root",
        )
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def test_a_name_that_no_disk_takes_is_left_out(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    long = Trace("x" * 300 + ".trace.json", 1, "digest")
    written.profiles(peer, 80, 20, long, placed(tmp_path, "a.trace.json", torch_trace(OPS)))
    told, _ = merged(written.close(), tmp_path)
    (warning,) = told.warnings
    assert warning.startswith(f"left out: the trace {long.path}: {tmp_path / long.path} can't be read: [Errno 36]")
    assert told.traced_events == len(OPS) + 2


def test_a_trace_that_was_moved_is_found_where_it_was_told_last(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    first = Trace("step/a.trace.json", 0, "")
    moved = placed(root, "rollout-replica0_a.trace.json", torch_trace(OPS))
    first = Trace(first.path, moved.nbytes, moved.sha256)
    written.profiles(peer, 80, 20, first)
    written.profiles(peer, 110, 20, moved)
    told, _ = merged(written.close(), root)
    assert (told.traces, told.warnings) == ((str(root / moved.path),), ())


def test_a_trace_that_is_no_json_any_more_is_cut_off_where_it_ends(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    broken = placed(root, "broken.trace.json.gz", torch_trace(OPS)[: -len(torch_trace(OPS)) // 3])
    later = placed(root, "later.trace.json", torch_trace(OPS))
    written.profiles(peer, 80, 20, broken, later)
    told, events = merged(written.close(), root)
    (warning,) = told.warnings
    assert warning.startswith(f"cut off: {root}/broken.trace.json.gz is no trace any more after 3 events: parse error")
    assert len([one for one in events if one["ph"] == "X" and one["name"] == "gemm"]) == 1, "the next one is whole"


def test_without_estimates_traces_are_on_their_nodes_clock_and_that_is_said(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    peer = written.joins(PRIMARY)
    trace = placed(root, "a.trace.json", torch_trace(OPS))
    written.profiles(peer, 80, 20, trace)
    told, _ = merged(written.close(), root)
    assert told.warnings == (f"{root}/a.trace.json: on its node's own clock, whose offset is unknown",)


def test_a_trace_from_before_the_run_is_told(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY)
    trace = placed(tmp_path, "a.trace.json", torch_trace([Op("old", -5_000, 1), *OPS]))
    written.profiles(peer, 80, 20, trace)
    told = write_timeline(written.close(), tmp_path / "t.json", [tmp_path])
    assert told.warnings[-1] == (
        f"{tmp_path}/a.trace.json: 1 of its 6 events lie before the run began, where Perfetto draws none; is the clock "
        "of its node right?"
    )


def test_a_trace_that_was_told_late_is_placed_by_the_clock_of_when_it_was_recorded(
    written: Written, tmp_path: Path
) -> None:
    """The node's clock loses a hundred ppm; the bus was away until it heard of the trace."""
    slow = [structs.replace(written.clock(at, at * 100), error_ns=200_000) for at in (0, 1_000, 599_000, 600_000)]
    peer = written.joins(PRIMARY, clocks=tuple(slow))
    written.profiles(peer, 600_000, 20, placed(tmp_path, "a.trace.json", torch_trace(OPS)))
    told, events = merged(written.close(), tmp_path)
    assert told.warnings == ()
    ts, _ = ops(events)["aten::mm"]
    assert abs(ts - 59_000) < 200, "with the clock of the end it would be 60 ms late"
    assert told.clocks[0].offset_ns == pytest.approx(60 * MS, abs=400_000)


def test_a_clock_that_moves_while_it_is_recorded_is_told(written: Written, tmp_path: Path) -> None:
    slow = [written.clock(at, at * 100) for at in (0, 1_000, 299_000, 300_000)]
    peer = written.joins(PRIMARY, clocks=tuple(slow))
    long = [Op("first", 60, 10), Op("last", 299_970, 1)]
    written.profiles(peer, 300_000, 20, placed(tmp_path, "a.trace.json", torch_trace(long)))
    told, events = merged(written.close(), tmp_path)
    assert abs(ops(events)["first"][0] - 59_000) < 100
    (warning,) = told.warnings
    begin = f"{tmp_path}/a.trace.json: the clock of its node moved by +29."
    assert warning.startswith(begin) and warning.endswith("meanwhile, and the trace is placed by its begin")


def test_the_error_of_a_clock_is_that_of_where_its_traces_lie(written: Written, tmp_path: Path) -> None:
    clocks = [structs.replace(written.clock(at), error_ns=error) for at, error in ((0, 5 * MS), (500, 5 * MS))]
    peer = written.joins(PRIMARY, clocks=(*clocks, written.clock(60_000)))
    trace = placed(tmp_path, "a.trace.json", torch_trace(OPS))
    written.profiles(peer, 80, 20, trace)
    written.commands(peer, 60_010, 1, Acted(calls=("flush",)))
    log = written.close()
    alone = write_timeline(log, tmp_path / "alone.json")
    assert alone.clocks[0].error_ns == 8_650, "1 µs, and what clocks drift in half a second"
    both = write_timeline(log, tmp_path / "both.json", [tmp_path])
    assert both.clocks[0].error_ns == pytest.approx(900_000, abs=2_000), "what they drift in a minute"


def test_a_trace_that_is_moved_away_while_others_are_read_does_not_end_the_timeline(
    written: Written, tmp_path: Path
) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    names = ("first", "moved", "last")
    told_of = [placed(tmp_path, f"{name}.trace.json", torch_trace([Op(name, 60, 10)])) for name in names]
    written.profiles(peer, 80, 20, *told_of)
    moved = tmp_path / "moved.trace.json"

    def say(text: str) -> None:
        if text.startswith("reading") and "first" in text:
            moved.unlink()

    told = write_timeline(written.close(), tmp_path / "t.json", [tmp_path], say=say)
    assert ops(read(tmp_path / "t.json")["traceEvents"]).keys() >= {"first", "last"}
    assert told.warnings == (
        f"cut off: {moved} is no trace any more after 0 events: [Errno 2] No such file or directory: '{moved}'",
    )


def test_traces_without_a_root_are_told(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path, "a.trace.json", torch_trace(OPS)))
    told, events = merged(written.close())
    assert events == []
    assert told.warnings == ("left out: 1 traces that the log names; give --traces with their root",)


# --- size -------------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from pathlib import Path
from controlplane.timeline.perfetto import write_timeline
log, out, root = map(Path, sys.argv[1:])
told = write_timeline(log, out, [root])
assert told.warnings == (), told.warnings
print(told.traced_events, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def large(path: Path, events: int) -> Trace:
    """A trace of that many events, about 210 bytes each; written piece by piece."""
    whole = torch_trace([Op("aten::mm", 60, 0.001, tid=1)])
    begin, event = whole.split(b'{"ph": "X"')
    one, end = (b'{"ph": "X"' + event).split(b"\n  ]")
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(begin)
        for i in range(events // 100):
            file.write(b",\n  ".join([one.replace(b'"External id": 0', b'"External id": %d' % i)] * 100) + b",\n  ")
        file.write(one + b"\n  ]" + end)
    return _told(path)


def _told(path: Path) -> Trace:
    data = path.read_bytes()
    return Trace(path.name, len(data), hashlib.sha256(data).hexdigest())


def peak(folder: Path, events: int) -> tuple[int, int]:
    """How many events were merged, and how much memory that took, in bytes."""
    folder.mkdir()
    written = Written(folder / "run.db")
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, large(folder / "large.trace.json.gz", events))
    done = python("-c", PEAK, written.close(), folder / "t.json.gz", folder)
    assert done.returncode == 0, done.stderr
    count, nbytes = done.stdout.split()
    return int(count), int(nbytes)


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    few, many = peak(tmp_path / "small", 1_000), peak(tmp_path / "large", 200_000)  # 0.2 and 42 MB
    assert (few[0], many[0]) == (1_003, 200_003)
    assert many[1] - few[1] < 16 * 1024 * 1024


def test_the_file_is_one_json_object_a_line_for_each_event(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path, "a.trace.json", torch_trace(OPS)))
    out = tmp_path / "t.json"
    told = write_timeline(written.close(), out, [tmp_path])
    lines = out.read_text().splitlines()
    parsed = [json.loads(line.rstrip(",")) for line in lines[1:-1]]
    assert len([one for one in parsed if one["pid"] > 100_000]) >= told.traced_events
    assert json.loads(out.read_text())["traceEvents"] == parsed


@pytest.mark.parametrize(
    "odd",
    [
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": null, "dur": 1}',
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": null}',
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": [1], "dur": 1}',
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 1e999999, "dur": 1}',
        '{"ph": "X", "name": "x", "pid": [1], "tid": 1, "ts": 1, "dur": 1}',
        '"x"',
    ],
)
def test_an_odd_event_is_left_out_and_counted_and_all_others_are_drawn(
    written: Written, tmp_path: Path, odd: str
) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    content = torch_trace(OPS).replace(b'"traceEvents": [', f'"traceEvents": [{odd},'.encode())
    written.profiles(peer, 80, 20, placed(tmp_path / "traces", "a.pt.trace.json", content))
    told, events = merged(written.close(), tmp_path / "traces")
    assert set(ops(events)) == {op.name for op in OPS}
    file = tmp_path / "traces" / "a.pt.trace.json"
    assert told.warnings == (f"left out: 1 events of {file} without a place that can be told",)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "inf", "nan"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_number_that_is_none_does_not_end_a_trace(
    written: Written, tmp_path: Path, number: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes one into what a user says of a run, and torch wrote one as the bandwidth of what took no time."""
    monkeypatch.setattr("controlplane.timeline.torch_traces.READ_BYTES", size)
    named = Op(rf"f(\"x\": {number}, 1)", 60, 10)
    content = torch_trace([named, *OPS[1:]]).replace(b'"External id": 1,', f'"GB/s" : {number} ,'.encode())
    content = content.replace(b'"schemaVersion"', f'"loss":{number},"schemaVersion"'.encode())
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path / "traces", "a.pt.trace.json.gz", content))
    told, events = merged(written.close(), tmp_path / "traces")
    assert set(ops(events)) == {f'f("x": {number}, 1)', *(op.name for op in OPS[1:])}
    assert [one["args"]["GB/s"] for one in events if "GB/s" in one.get("args", {})] == [None]
    assert told.warnings == ()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_text_that_is_not_utf_8_does_not_end_a_trace(
    written: Written, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perfetto shows such a trace when it is alone."""
    monkeypatch.setattr("controlplane.timeline.torch_traces.READ_BYTES", size)
    content = torch_trace([Op("größe", 60, 1), Op("XY", 62, 1), *OPS]).replace(b"XY", b"caf\xe9")
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path / "traces", "a.pt.trace.json.gz", content))
    told, events = merged(written.close(), tmp_path / "traces")
    assert set(ops(events)) == {"größe", "caf\ufffd", *(op.name for op in OPS)}
    assert told.warnings == ()


@pytest.mark.parametrize("content", [b"[]", b'{"other": [1]}', b'{"traceEvents": []}', b"7"])
def test_a_file_without_events_is_named(written: Written, tmp_path: Path, content: bytes) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path / "traces", "a.pt.trace.json", content))
    told, _ = merged(written.close(), tmp_path / "traces")
    (warning,) = told.warnings
    assert warning.endswith("a.pt.trace.json has no events: is it a trace of torch's?")
