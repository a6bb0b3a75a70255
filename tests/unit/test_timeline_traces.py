"""Torch traces in a timeline: found, checked, placed on the bus's clock, renumbered, streamed."""

import gzip
import hashlib
import json
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec import structs

from controlplane.timeline.perfetto import Timeline, write_timeline
from schemas.agent_status import Clock
from schemas.identity import Identity
from schemas.outcomes import Trace
from tests.running import python, typed
from tests.timeline.trace_events import Event, checked_timeline, read
from tests.timeline.written import MS, Op, Written, placed, torch_trace

PRIMARY = Identity(replica=0, node_rank=0, nnodes=2, gpus_per_node=2)
SECOND = Identity(replica=0, node_rank=1, nnodes=2, gpus_per_node=2)
ACTOR = Identity(replica=3, node_rank=0, role="actor")
OPS = [Op("aten::mm", 60, 10), Op("aten::add", 61, 2), Op("gemm", 65, 3, pid=0, tid=7)]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run.db")


def merged(log: Path, *roots: Path) -> tuple[Timeline, list[Event]]:
    """Write a timeline. Returns what was written, and the events that came from traces. All are well-formed."""
    timeline, events = checked_timeline(log, *roots)
    return timeline, [event for event in events if event["pid"] > 100_000]


def drawn(
    written: Written, content: bytes, *clocks: Clock, name: str = "a.trace.json.gz", at_ms: int = 80
) -> tuple[Timeline, list[Event]]:
    """As `merged`, for one trace of one agent, which reports it at `at_ms`. Its clock is exact by default."""
    root = written.path.with_name("traces")
    peer = written.joins(PRIMARY, clocks=clocks or (written.clock(0), written.clock(100)))
    written.profiles(peer, at_ms, 20, placed(root, name, content))
    return merged(written.close(), root)


def ops(events: list[Event]) -> dict[str, tuple[Decimal, Decimal]]:
    return {op["name"]: (Decimal(str(op["ts"])), Decimal(str(op["dur"]))) for op in events if op["ph"] == "X"}


def processes(events: list[Event]) -> list[str]:
    return sorted(event["args"]["name"] for event in events if event["name"] == "process_name")


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("base_last", [False, True])
@pytest.mark.parametrize("offset_ns", [0, -37_000_000_000, 250_000])
def test_a_trace_is_placed_on_the_clock_of_the_bus(
    written: Written, packed: str, base_last: bool, offset_ns: int
) -> None:
    """The node's wall clock, and so its trace, is ahead of the bus's by -offset_ns."""
    clocks = written.clock(0, offset_ns), written.clock(100, offset_ns)
    shifted = [Op(op.name, op.at_ms - offset_ns / MS, op.for_ms, op.pid, op.tid) for op in OPS]
    content = torch_trace(shifted, base_last=base_last)
    timeline, events = drawn(written, content, *clocks, name=f"step/a.pt.trace.json{packed}")
    assert timeline.warnings == ()
    # The timeline begins with the start of the agent, at 1 ms. Torch's times end on a quarter of a microsecond.
    assert ops(events) == {
        "aten::mm": (Decimal("59000.25"), Decimal(10_000)),
        "aten::add": (Decimal("60000.25"), Decimal(2_000)),
        "gemm": (Decimal("64000.25"), Decimal(3_000)),
    }
    assert timeline.traced_events == len(OPS)


def test_annotations_and_calls_that_overlap_are_all_drawn(written: Written) -> None:
    """With stacks, an annotation begins inside the call that made it and outlasts it; a call can outlast its caller."""
    stacked = [
        Op("learn", 61, 8, cat="user_annotation"),
        Op("aten::mm", 62, 1),
        Op("caller", 60, 9.5, cat="python_function"),  # torch writes Python's calls after all others
        Op("enter", 60.5, 1, cat="python_function"),
        Op("callee", 68, 1.75, cat="python_function"),
    ]
    _, events = drawn(written, torch_trace(stacked))
    lasts = {name: dur for name, (_, dur) in ops(events).items()}
    assert lasts == {"learn": 8000, "aten::mm": 1000, "caller": 9500, "enter": 1000, "callee": 1750}
    threads = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert threads["aten::mm"] == threads["caller"] == threads["enter"]
    assert len({threads[name] for name in ("caller", "callee", "learn")}) == 3


def test_kernels_that_overlap_on_a_stream_are_not_cut(written: Written) -> None:
    """Each is launched before the previous one has ended. An arrow leads to the beginning of each."""
    kernels = [Op(f"k{i}", 60 + i, 1.25, pid=0, tid=7, cat="kernel") for i in range(5)]
    whole = torch_trace([op for kernel in kernels for op in (Op("launch", kernel.at_ms - 5, 0.5), kernel)], arrows=True)
    metadata = [("thread_name", {"name": "stream 7 "}), ("thread_sort_index", {"sort_index": 7})]
    names = [json.dumps({"ph": "M", "name": kind, "pid": 0, "tid": 7, "args": args}) for kind, args in metadata]
    content = whole.replace(b'"traceEvents": [', b'"traceEvents": [%s,' % ",".join(names).encode())
    timeline, events = drawn(written, content)
    assert timeline.traced_events == 2 * 2 * len(kernels)
    shown = {event["name"]: (event["tid"], event["dur"]) for event in events if event.get("cat") == "kernel"}
    assert {dur for _, dur in shown.values()} == {1250}
    about: dict[str, dict[int, dict[str, object]]] = {"thread_name": {}, "thread_sort_index": {}}
    for event in events:
        if event["name"] in about:
            about[event["name"]][event["tid"]] = event["args"]
    threads = [about["thread_name"][shown[f"k{i}"][0]]["name"] for i in range(5)]
    assert threads == ["stream 7", "stream 7 (2)", "stream 7", "stream 7 (2)", "stream 7"]
    assert {about["thread_sort_index"][tid]["sort_index"] for tid, _ in shown.values()} == {7}
    assert [event["tid"] for event in events if event["ph"] == "f"] == [shown[f"k{i}"][0] for i in range(5)]


def test_processes_are_named_after_their_owners(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    for place, name, rank in ((PRIMARY, "a", 1), (SECOND, "b", None), (ACTOR, "c", 3)):
        peer = written.joins(place, clocks=(written.clock(0),))
        trace = placed(root, f"{name}.pt.trace.json.gz", torch_trace(OPS, rank=rank))
        if place is ACTOR:
            trace = Trace(trace.path, trace.nbytes, trace.sha256, 3)
        front = placed(root, "node.async_llm.9.pt.trace.json.gz", torch_trace([Op("feed", 70, 1)]))
        written.profiles(peer, 80, 20, *((trace, front) if place is PRIMARY else (trace,)))
    _, events = merged(written.close(), root)
    assert processes(events) == ["actor rank 3", "replica 0 front end", "replica 0 node 1", "replica 0 rank 1"]


def threads(events: list[Event]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_what_has_no_events_has_no_track(written: Written) -> None:
    """Torch names eight GPUs, also where there is none."""
    about = [("process_name", "python"), ("process_labels", "GPU {}"), ("thread_name", "stream 7")]
    fields = {"process_name": "name", "process_labels": "labels", "thread_name": "name"}
    names = [
        {"ph": "M", "name": kind, "pid": gpu, "tid": 7, "args": {fields[kind]: text.format(gpu)}}
        for gpu in range(8)
        for kind, text in about
    ]
    listed = ",".join(map(json.dumps, names)).encode()
    content = torch_trace([*OPS, Op("gemm", 65, 3, pid=3, tid=7)])
    timeline, events = drawn(written, content.replace(b'"traceEvents": [', b'"traceEvents": [%s,' % listed))
    assert (timeline.traced_events, timeline.warnings) == (4, ())
    assert processes(events) == ["replica 0 node 0"]
    assert sorted(threads(events).values()) == ["78", "GPU 0 stream 7", "GPU 3 stream 7"]


@pytest.mark.parametrize("later_ms", [100, 5])
def test_traces_of_one_rank_share_its_process(written: Written, tmp_path: Path, later_ms: int) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    second = [Op(op.name, op.at_ms + later_ms, op.for_ms, op.pid, op.tid) for op in OPS]
    traces = [placed(tmp_path, f"{i}.trace.json", torch_trace(ops)) for i, ops in enumerate((OPS, second))]
    written.profiles(peer, 80, 20, traces[0])
    written.profiles(peer, 200, 20, traces[1])
    _, events = merged(written.close(), tmp_path)
    assert set(processes(events)) == {"replica 0 node 0"}
    assert len({event["pid"] for event in events}) == 1
    assert len(threads(events)) == 4


def test_files_with_the_same_numbers_are_renumbered(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    for place in (PRIMARY, SECOND):
        peer = written.joins(place, clocks=(written.clock(0),))
        content = torch_trace([*OPS[:2], *OPS[:2]], arrows=True) + b" " * place.node_rank  # another digest
        written.profiles(peer, 80, 20, placed(root, f"{place.node_rank}.trace.json", content))
    timeline, events = merged(written.close(), root)
    assert len(timeline.traces) == 2
    assert len({event["pid"] for event in events}) == 2
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) == 4
    assert {event["args"]["Addr"] for event in events if event["ph"] == "X"} == {2**64 - 1}, "large numbers stay exact"


def test_missing_and_different_files_are_named_and_left_out(written: Written, tmp_path: Path) -> None:
    root, copy = tmp_path / "traces", tmp_path / "copy"
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    good = placed(copy, "good.trace.json", torch_trace(OPS))
    altered = placed(root, "altered.trace.json", torch_trace(OPS[:1]))
    (root / altered.path).write_bytes(torch_trace(OPS[:1]).replace(b"aten::mm", b"aten::xx"))
    longer = placed(root, "longer.trace.json", torch_trace(OPS[1:]))
    (root / longer.path).write_bytes(torch_trace(OPS))
    gone = Trace("gone.trace.json", 5, "ab")
    outside = Trace("../outside.trace.json", 5, "cd")
    long = Trace("x" * 300 + ".trace.json", 1, "gh")
    written.profiles(peer, 80, 20, good, altered, longer, gone, outside, long, Trace("memory.pickle", 9, "ef"))
    timeline, events = merged(written.close(), root, copy)
    assert timeline.traces == (str(copy / "good.trace.json"),)
    assert len(ops(events)) == 3
    unread = [f"{f} can't be read: [Errno 36] File name too long: '{f}'" for f in (root / long.path, copy / long.path)]
    nbytes, found, reported = len(torch_trace(OPS)), f"{_digest(root / altered.path)}…", altered.sha256[:16]
    assert timeline.warnings == tuple(
        f"left out: trace {reason}"
        for reason in (
            f"altered.trace.json: {root / altered.path} has sha256 {found}, the log says {reported}…: another file",
            f"longer.trace.json: {root / longer.path} has {nbytes} bytes, the log says {longer.nbytes}",
            f"gone.trace.json: not found ({root}, {copy})",
            "../outside.trace.json: not a path below a traces root",
            f"{long.path}: {'; '.join(unread)}",
        )
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def test_a_moved_trace_is_found_where_it_was_last_reported(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    first = Trace("step/a.trace.json", 0, "")
    moved = placed(root, "rollout-replica0_a.trace.json", torch_trace(OPS))
    first = Trace(first.path, moved.nbytes, moved.sha256)
    written.profiles(peer, 80, 20, first)
    written.profiles(peer, 110, 20, moved)
    timeline, _ = merged(written.close(), root)
    assert (timeline.traces, timeline.warnings) == ((str(root / moved.path),), ())


def test_a_truncated_trace_is_drawn_up_to_where_it_ends(written: Written, tmp_path: Path) -> None:
    root = tmp_path / "traces"
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    broken = placed(root, "broken.trace.json.gz", torch_trace(OPS)[: -len(torch_trace(OPS)) // 3])
    later = placed(root, "later.trace.json", torch_trace(OPS))
    written.profiles(peer, 80, 20, broken, later)
    timeline, events = merged(written.close(), root)
    (warning,) = timeline.warnings
    assert warning.startswith(f"cut off: {root}/broken.trace.json.gz can't be read after 1 events: parse error")
    assert [event["name"] for event in events if event["ph"] == "X"].count("gemm") == 1, "the next file is whole"


def test_without_clock_estimates_a_trace_keeps_its_nodes_clock_even_before_the_run(
    written: Written, tmp_path: Path
) -> None:
    peer = written.joins(PRIMARY)
    written.profiles(peer, 80, 20, placed(tmp_path, "a.trace.json", torch_trace([Op("old", -5_000, 1), *OPS])))
    timeline = write_timeline(written.close(), tmp_path / "t.json", [tmp_path])
    unknown, early = timeline.warnings
    assert unknown == f"{tmp_path}/a.trace.json: on its node's own clock, whose offset is unknown"
    assert early == (
        f"{tmp_path}/a.trace.json: 1 of 4 events lie before the run began, where Perfetto draws nothing; is its "
        "node's clock right?"
    )


def test_a_trace_reported_late_is_placed_by_the_clock_at_its_recording(written: Written) -> None:
    """The node's clock loses a hundred ppm; the bus was away until it heard of the trace."""
    slow = [structs.replace(written.clock(at, at * 100), error_ns=200_000) for at in (0, 1_000, 599_000, 600_000)]
    timeline, events = drawn(written, torch_trace(OPS), *slow, at_ms=600_000)
    assert timeline.warnings == ()
    ts, _ = ops(events)["aten::mm"]
    assert abs(ts - 59_000) < 200, "with the clock of the end it would be 60 ms late"
    assert timeline.clocks[0].offset_ns == pytest.approx(60 * MS, abs=400_000)


def test_a_trace_that_disappears_does_not_end_the_timeline(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    names = ("first", "moved", "last")
    reported = [placed(tmp_path, f"{name}.trace.json", torch_trace([Op(name, 60, 10)])) for name in names]
    written.profiles(peer, 80, 20, *reported)
    moved = tmp_path / "moved.trace.json"

    def say(text: str) -> None:
        if text.startswith("reading") and "first" in text:
            moved.unlink()

    timeline = write_timeline(written.close(), tmp_path / "t.json", [tmp_path], say=say)
    assert ops(read(tmp_path / "t.json")["traceEvents"]).keys() >= {"first", "last"}
    assert timeline.warnings == (
        f"cut off: {moved} can't be read after 0 events: [Errno 2] No such file or directory: '{moved}'",
    )


def test_traces_beside_the_log_are_found_unasked_and_can_be_left_out(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path / "traces", "a.trace.json", torch_trace(OPS)))
    log = written.close()
    for options, traced in (((), len(OPS)), (("--no-traces",), 0)):
        done = typed("timeline", log, "--json", "--force", *options)
        made = json.loads(done.stdout)
        assert (done.returncode, made["traced_events"], made["warnings"]) == (0, traced, [])
    wrong = typed("timeline", log, "--no-traces", "--traces", tmp_path)
    assert wrong.returncode == 2 and "--traces and --no-traces exclude each other" in wrong.stderr


def test_traces_without_a_root_are_left_out(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path, "a.trace.json", torch_trace(OPS)))
    timeline, events = merged(written.close())
    assert events == []
    assert timeline.warnings == ("left out: 1 traces that the log names; --traces says where they are",)


# --- size -------------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from pathlib import Path
from controlplane.timeline.perfetto import write_timeline
log, out, root = map(Path, sys.argv[1:])
timeline = write_timeline(log, out, [root])
assert timeline.warnings == (), timeline.warnings
print(timeline.traced_events, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def large(path: Path, events: int) -> Trace:
    """A trace of that many events of about 210 bytes, written piece by piece."""
    whole = torch_trace([Op("aten::mm", 60, 0.001, tid=1)])
    begin, rest = whole.split(b'{"ph": "X"')
    event, end = (b'{"ph": "X"' + rest).split(b"\n  ]")
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(begin)
        for i in range(events // 100):
            file.write(b",\n  ".join([event.replace(b'"External id": 0', b'"External id": %d' % i)] * 100) + b",\n  ")
        file.write(event + b"\n  ]" + end)
    data = path.read_bytes()
    return Trace(path.name, len(data), hashlib.sha256(data).hexdigest())


def peak(folder: Path, events: int) -> tuple[int, int]:
    """Merge a trace in a process. Returns the number of events, and the peak memory in bytes."""
    folder.mkdir()
    written = Written(folder / "run.db")
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, large(folder / "large.trace.json.gz", events))
    finished = python("-c", PEAK, written.close(), folder / "t.json.gz", folder)
    assert finished.returncode == 0, finished.stderr
    count, nbytes = finished.stdout.split()
    return int(count), int(nbytes)


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    few, many = peak(tmp_path / "small", 1_000), peak(tmp_path / "large", 100_000)  # 0.2 and 21 MB
    assert (few[0], many[0]) == (1_001, 100_001)
    assert many[1] - few[1] < 8 * 1024 * 1024


def test_the_file_is_one_json_object_with_a_line_per_event(written: Written, tmp_path: Path) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.profiles(peer, 80, 20, placed(tmp_path, "a.trace.json", torch_trace(OPS)))
    out = tmp_path / "t.json"
    timeline = write_timeline(written.close(), out, [tmp_path])
    lines = out.read_text().splitlines()
    parsed = [json.loads(line.rstrip(",")) for line in lines[1:-1]]
    assert len([event for event in parsed if event["pid"] > 100_000]) >= timeline.traced_events
    assert json.loads(out.read_text())["traceEvents"] == parsed


@pytest.mark.parametrize(
    "malformed",
    [
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": null, "dur": 1}',
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": null}',
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": [1], "dur": 1}',
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 1e999999, "dur": 1}',
        '{"ph": "X", "name": "x", "pid": [1], "tid": 1, "ts": 1, "dur": 1}',
        '{"ph": "s", "name": "x", "cat": "x", "id": "x", "pid": 1, "tid": 1, "ts": 1}',
        '"x"',
    ],
)
def test_a_malformed_event_is_left_out_and_counted(written: Written, tmp_path: Path, malformed: str) -> None:
    content = torch_trace(OPS).replace(b'"traceEvents": [', f'"traceEvents": [{malformed},'.encode())
    timeline, events = drawn(written, content)
    assert set(ops(events)) == {op.name for op in OPS}
    file = tmp_path / "traces" / "a.trace.json.gz"
    assert timeline.warnings == (f"left out: 1 malformed events of {file}",)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "inf", "nan"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_number_that_is_not_finite_does_not_end_a_trace(
    written: Written, number: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes them in user metadata, and torch as the bandwidth of a kernel that took no time."""
    monkeypatch.setattr("controlplane.timeline.torch_traces.READ_BYTES", size)
    named = Op(rf"f(\"x\": {number}, 1)", 60, 10)
    content = torch_trace([named, *OPS[1:]]).replace(b'"External id": 1,', f'"GB/s" : {number} ,'.encode())
    content = content.replace(b'"schemaVersion"', f'"loss":{number},"schemaVersion"'.encode())
    timeline, events = drawn(written, content)
    assert set(ops(events)) == {f'f("x": {number}, 1)', *(op.name for op in OPS[1:])}
    assert [event["args"]["GB/s"] for event in events if "GB/s" in event.get("args", {})] == [None]
    assert timeline.warnings == ()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_text_that_is_not_utf_8_does_not_end_a_trace(
    written: Written, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perfetto alone shows such a trace."""
    monkeypatch.setattr("controlplane.timeline.torch_traces.READ_BYTES", size)
    content = torch_trace([Op("größe", 60, 1), Op("XY", 62, 1), *OPS]).replace(b"XY", b"caf\xe9")
    timeline, events = drawn(written, content)
    assert set(ops(events)) == {"größe", "caf\ufffd", *(op.name for op in OPS)}
    assert timeline.warnings == ()


@pytest.mark.parametrize("content", [b"[]", b'{"other": [1]}', b'{"traceEvents": []}', b"7"])
def test_a_file_without_events_is_named(written: Written, content: bytes) -> None:
    (warning,) = drawn(written, content)[0].warnings
    assert warning.endswith("a.trace.json.gz has no events; is it a torch trace?")
