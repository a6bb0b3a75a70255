"""One sample of every message kind, whose bytes are in wire.json and must never change.

    python -m tests.golden.samples        # writes wire.json; run it when you add a kind

If the bytes of an existing kind change, older agents can't read it any more: change the protocol version as well.
"""

import json
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import Raw, Struct

from controlplane.machine.events import (
    AnswersReceived,
    Closed,
    Conclude,
    CoordinatorSettings,
    HelloReceived,
    Issued,
    JoinReceived,
    Opened,
    PeerAnswer,
    PeerLost,
    Ping,
    Publish,
    Refuse,
    ResendRequested,
    Send,
    StatusReceived,
    SyncRequested,
    TimerFired,
)
from schemas.commands import (
    Checkpoint,
    EngineCommand,
    EpochStart,
    Manifest,
    ProfileCommand,
    ProfilePlan,
    Target,
    WeightSync,
    Window,
)
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.events import (
    Abort,
    Answer,
    CheckSource,
    CommandReceived,
    Decision,
    EngineObserved,
    EngineReturned,
    Fault,
    Flush,
    HeadSeen,
    LeaseExpired,
    Load,
    Observation,
    Pause,
    Perform,
    RequestResend,
    RequestSnapshot,
    Restart,
    Resume,
    Returned,
    Sleep,
    SnapshotReceived,
    Started,
    StartProfile,
    StopProfile,
    Tick,
    Wake,
)
from schemas.identity import Identity, Operation, RolloutMode
from schemas.outcomes import Acted, ErrorKind, Failed, Missing, Reason, Skipped, Trace
from schemas.reports import AgentLine, AgentOutcome, AgentStatus, Clock, FleetStatus, Report, SyncReport
from schemas.wire import (
    MAGIC,
    MAJOR,
    MINOR,
    Ack,
    CommandOutcome,
    CommandRecord,
    DecisionBatch,
    Envelope,
    Goodbye,
    Header,
    Hello,
    Join,
    Rejoin,
    Replay,
    RequestRejected,
    ResendRequest,
    Snapshot,
    StatusRequest,
    Submit,
    TimeReply,
    TimeRequest,
    Welcome,
    encode,
)

FILE = Path(__file__).with_name("wire.json")

PLACE = Identity(replica=1, node_rank=0, nnodes=2, gpus_per_node=8, mode=RolloutMode.HYBRID)
PLAN = ProfilePlan(
    steps=frozenset({3, 1}),
    ranks=frozenset({0, 8}),
    window=Window(2, 5),
    activities=frozenset({"cuda", "cpu"}),
    with_stack=True,
)
SOURCE = Checkpoint("run/step_5")
MANIFEST = Manifest(tensors=3, nbytes=1024, layout="aa", content="bb")
SESSION = ProfileSession(3, PLAN)
PROFILE = ProfileCommand(action="start", step=3, plan=PLAN)
SYNC = WeightSync(phase="commit", version=5, source=SOURCE, manifest=MANIFEST, quarantine=frozenset({2, 0}))
TRACE = Trace("global_step_3/replica_1/a.json", 99, "cc")
ENVELOPE = Envelope(
    run="run-1",
    issued_at_ns=1_700_000_000_000_000_000,
    ttl_ms=29_000,
    body=Raw(encode(PROFILE)),
    target=Target(replicas=frozenset({1, 0})),
)
DESIRED = Desired(
    generation="paused",
    pause_mode="keep",
    asleep=frozenset({"weights", "kv_cache"}),
    profile=SESSION,
    committed=Committed(4, Checkpoint("run/step_4"), None),
    sync=Syncing(5, SOURCE, MANIFEST, "wait", "load"),
    quarantined=3,
)
CLOCK = Clock(at_ms=5_000, wall_ns=1_700_000_000_000_000_000, offset_ns=-250_000, error_ns=40_000)
STATUS = AgentStatus(
    ready=True, tokenizer="present", engine="tiny 1", generating=True, version=4, digest="dd", queued=1
)
OBSERVATION = Observation(
    engine="tiny 1",
    instance="one",
    tokenizer="present",
    operations=frozenset({Operation.LOAD, Operation.FLUSH}),
    generating=False,
    asleep=frozenset({"kv_cache"}),
    profiling=False,
    version=4,
    digest="dd",
)
REPORT = Report(
    seq=7,
    origin=2,
    command=PROFILE,
    outcomes=(
        AgentOutcome(agent="1.0", conclusion=Acted(calls=("start_profile",)), rule=10, latency_us=1500),
        AgentOutcome(agent="1.1", conclusion=Missing("gone")),
    ),
)

SAMPLES: tuple[Struct, ...] = (
    Header(MAGIC, MAJOR, MINOR, 3, 2, 70_000),
    ENVELOPE,
    # commands
    PROFILE,
    SYNC,
    EngineCommand(operation="sleep", tags=frozenset({"weights", "kv_cache"})),
    EpochStart(previous_epoch=2, logic=1),
    # agent to bus
    Hello(identity=PLACE, incarnation="i", journal="j", host="node-1", pid=4242),
    Join(),
    STATUS,
    AgentStatus(ready=True, clock=CLOCK),
    TimeRequest(sent_ns=5_000_000_000),
    CommandOutcome(outcome=Acted(calls=("load",), version=5, digest="dd", auto_stopped=True, traces=(TRACE,)), rule=10),
    CommandOutcome(outcome=Skipped(Reason.NOT_PRIMARY), rule=6),
    CommandOutcome(outcome=Failed(ErrorKind.ENGINE_ERROR, "what was seen"), rule=10),
    ResendRequest(first=8, credit=64),
    DecisionBatch(journal="j", first=12, decisions=(Decision(Raw(encode(Tick(at_ms=1))), Raw(encode(()))),)),
    Goodbye(),
    # bus to agent
    Welcome(run="run-1", publish_port=5556, heartbeat_ms=2000, lease_ms=60_000, recorded_decisions=11),
    Snapshot(desired=DESIRED),
    Replay(records=(CommandRecord(origin=2, seq=7, envelope=ENVELOPE),)),
    Ack(journal="j", through=12),
    Rejoin(reason="say hello", give_up=True),
    TimeReply(sent_ns=5_000_000_000, received_ns=1_700_000_000_000_000_000, replied_ns=1_700_000_000_000_030_000),
    # operators
    StatusRequest(),
    Submit(command=PROFILE, target=Target(), timeout_ms=30_000),
    FleetStatus(
        run="run-1",
        epoch=2,
        seq=7,
        version=4,
        log="run.db",
        agents=(
            AgentLine(
                agent="1.0",
                incarnation="i",
                host="node-1",
                state="live",
                silent_ms=5,
                seq=7,
                status=STATUS,
                waits_for=("a",),
            ),
        ),
        open=("pause (seq 7) waits for 1.0",),
    ),
    REPORT,
    RequestRejected(reason="not by hand"),
    # events of an agent's machine
    Started(at_ms=1, identity=PLACE, incarnation="i"),
    CommandReceived(at_ms=2, epoch=3, origin=2, seq=7, ttl_ms=900, command=PROFILE, target=Target()),
    HeadSeen(at_ms=3, epoch=3, seq=9),
    SnapshotReceived(at_ms=4, epoch=3, seq=9, desired=DESIRED),
    EngineObserved(at_ms=5, observation=OBSERVATION),
    EngineReturned(at_ms=6, call_id=1, result=Returned(digest="dd", traces=(TRACE,)), observation=OBSERVATION),
    EngineReturned(at_ms=6, call_id=2, result=Fault("engine_error", "no")),
    LeaseExpired(at_ms=7),
    Tick(at_ms=8),
    # its effects
    Perform(call_id=1, call=CheckSource(SOURCE, MANIFEST, 5)),
    Perform(call_id=2, call=Pause("wait")),
    Perform(call_id=3, call=Resume()),
    Perform(call_id=4, call=Sleep(frozenset({"weights"}))),
    Perform(call_id=5, call=Wake(frozenset({"kv_cache", "weights"}))),
    Perform(call_id=6, call=Load(5, SOURCE, MANIFEST)),
    Perform(call_id=7, call=Flush()),
    Perform(call_id=8, call=Abort()),
    Perform(call_id=9, call=StartProfile(SESSION, "global_step_3/replica_1")),
    Perform(call_id=10, call=StopProfile(SESSION, "global_step_3/replica_1")),
    Answer(epoch=2, seq=7, outcome=Skipped(Reason.ALREADY), rule=10),
    RequestResend(8),
    RequestSnapshot(),
    Restart(),
    # events of the coordinator
    Opened(
        at_us=1,
        at_ns=2,
        run="run-1",
        settings=CoordinatorSettings(
            heartbeat_ms=2000,
            agent_timeout_ms=10_000,
            lease_ms=60_000,
            history=1024,
            retransmit_ms=1000,
            publish_port=5556,
        ),
        logic=1,
    ),
    Issued(at_us=2, at_ns=3, ticket=1, command=PROFILE, target=Target(), timeout_ms=30_000),
    SyncRequested(
        at_us=3,
        at_ns=4,
        ticket=2,
        version=5,
        source=SOURCE,
        manifest=MANIFEST,
        in_flight="keep",
        quorum=2,
        target=Target(replicas=frozenset({1, 0})),
        timeout_ms=600_000,
    ),
    HelloReceived(
        at_us=4,
        peer="1.0/i",
        hello=Hello(identity=PLACE, incarnation="i", journal="j", host="node-1", pid=4242),
        recorded_decisions=11,
    ),
    JoinReceived(at_us=5, peer="1.0/i"),
    StatusReceived(at_us=6, peer="1.0/i", seq=7, status=STATUS),
    AnswersReceived(
        at_us=7, answers=(PeerAnswer(peer="1.0/i", origin=2, seq=7, outcome=Skipped(Reason.ALREADY), rule=10),)
    ),
    ResendRequested(at_us=8, peer="1.0/i", first=3, credit=64),
    PeerLost(at_us=9, peer="1.0/i", reason="silent"),
    TimerFired(at_us=10),
    Closed(at_us=11, at_ns=12),
    # its effects
    Publish(epoch=2, seq=7, envelope=ENVELOPE),
    Send(peer="1.0/i", epoch=2, seq=7, message=Ack(journal="j", through=12)),
    Ping(peer="1.0/i"),
    Conclude(ticket=1, report=REPORT),
    Conclude(
        ticket=2,
        report=SyncReport(version=5, status="committed", loaded=(1,), quarantined=(0,), phases=(REPORT,)),
    ),
    Refuse(ticket=3, kind="sync_in_progress", reason="one at a time"),
)


def named() -> dict[str, Struct]:
    """Return the samples by name: the kind, and a number if there are several of it."""
    samples: dict[str, Struct] = {}
    for sample in SAMPLES:
        name = type(sample).__name__
        number = sum(other.partition(" ")[0] == name for other in samples)
        samples[f"{name} {number + 1}" if number else name] = sample
    return samples


def kinds(union: object) -> set[type]:
    """Return the members of a union."""
    return set(get_args(union))


def main() -> None:
    """Write wire.json: the bytes of each sample, and the same for people to read."""
    vectors = {}
    for name, sample in named().items():
        encoded = encode(sample)
        vectors[name] = {"value": msgspec.to_builtins(msgspec.msgpack.decode(encoded)), "hex": encoded.hex()}
    FILE.write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    main()
