"""One sample of every message kind, whose bytes are in wire.json and must never change.

    python -m tests.golden.samples        # writes wire.json; run it when you add a kind

If the bytes of an existing kind change, older agents can't read it any more: change the protocol version as well.
"""

import json
from pathlib import Path

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from controlplane.machine import events as bus
from schemas import commands, wire
from schemas import events as agent
from schemas.agent_status import AgentStatus, Clock, RequestCounts
from schemas.desired import Adapter, Committed, Desired, ProfileSession, Syncing
from schemas.identity import Identity, Operation, RolloutMode
from schemas.outcomes import Acted, ErrorKind, Failed, Missing, Reason, Skipped, Trace
from schemas.reports import AgentLine, AgentOutcome, FleetStatus, RecentFailure, Report, SyncReport

FILE = Path(__file__).with_name("wire.json")

PLACE = Identity(replica=1, node_rank=0, nnodes=2, gpus_per_node=8, mode=RolloutMode.HYBRID)
PLAN = commands.ProfilePlan(
    steps=frozenset({3, 1}),
    ranks=frozenset({0, 8}),
    window=commands.Window(2, 5),
    activities=frozenset({"cuda", "cpu"}),
    with_stack=True,
)
SOURCE = commands.Checkpoint("run/step_5")
DELTA = commands.Checkpoint("run/step_5", delta="run/step_5-delta", base=4)
PUSHED = commands.Pushed("5", path="run/step_5")
MANIFEST = commands.Manifest(tensors=3, nbytes=1024, layout="aa", content="bb")
SESSION = ProfileSession(3, PLAN)
PROFILE = commands.ProfileCommand(action="start", step=3, plan=PLAN)
SYNC = commands.WeightSync(phase="commit", version=5, source=SOURCE, manifest=MANIFEST, quarantine=frozenset({2, 0}))
ADAPTER = commands.AdapterVersion(
    name="policy", version=7, path="adapters/step_7", manifest=MANIFEST, config="cc", base=5
)
TRACE = Trace("global_step_3/replica_1/a.json", 99, "cc")
ENVELOPE = wire.Envelope(
    run="run-1",
    issued_at_ns=1_700_000_000_000_000_000,
    ttl_ms=29_000,
    body=Raw(wire.encode(PROFILE)),
    target=commands.Target(replicas=frozenset({1, 0})),
)
DESIRED = Desired(
    generation="paused",
    pause_mode="keep",
    asleep=frozenset({"weights", "kv_cache"}),
    profile=SESSION,
    committed=Committed(4, commands.Checkpoint("run/step_4"), None),
    sync=Syncing(5, SOURCE, MANIFEST, "wait", "load"),
    quarantined=3,
)
CLOCK = Clock(at_ms=5_000, wall_ns=1_700_000_000_000_000_000, offset_ns=-250_000, error_ns=40_000)
STATUS = AgentStatus(
    ready=True, tokenizer="present", engine="tiny 1", generating=True, version=4, digest="dd", queued=1
)
OBSERVATION = agent.Observation(
    engine="tiny 1",
    instance="one",
    tokenizer="present",
    operations=frozenset({Operation.LOAD, Operation.FLUSH}),
    generating=False,
    asleep=frozenset({"kv_cache"}),
    profiling=False,
    version=4,
    digest="dd",
    running=2,
    generated=1000,
    trouble="it refuses the key",
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
AWAY = Report(
    seq=8, origin=2, command=SYNC, outcomes=(AgentOutcome(agent="3.0", conclusion=Missing("absent", away_ms=180_000)),)
)

TOKEN = "0123456789abcdef" * 2
URL = "http://node-1:8000"

SAMPLES: tuple[Struct, ...] = (
    wire.Header(wire.MAGIC, wire.MAJOR, wire.MINOR, 3, 2, 70_000),
    ENVELOPE,
    # commands
    PROFILE,
    SYNC,
    commands.WeightSync(phase="prepare", version=5, source=DELTA, manifest=MANIFEST),
    commands.EngineCommand(operation="sleep", tags=frozenset({"weights", "kv_cache"})),
    commands.EpochStart(previous_epoch=2, logic=1),
    commands.AdapterSync(phase="commit", adapter=ADAPTER, keep=3),
    commands.AdapterDrop(name="policy"),
    commands.Drain(grace_ms=30_000),
    # agent to bus
    wire.Hello(identity=PLACE, incarnation="i", journal="j", host="node-1", pid=4242),
    wire.Hello(identity=PLACE, incarnation="i", journal="j", host="node-1", pid=4242, rejoin=True, endpoint=URL),
    wire.Leave(grace_ms=30_000),
    wire.PlaceRequest(token=TOKEN),
    wire.Join(),
    STATUS,
    AgentStatus(ready=True, clock=CLOCK),
    AgentStatus(ready=False, wedged=True, trouble="tiny 1 is wedged"),
    AgentStatus(ready=True, activity="load", since_ms=4_000, clock=CLOCK),
    AgentStatus(ready=True, adapters_missing=("policy-v7",), adapters_left=("policy-v5",)),
    wire.TimeRequest(sent_ns=5_000_000_000),
    RequestCounts(running=2, waiting=5),
    wire.CommandOutcome(
        outcome=Acted(calls=("load",), version=5, digest="dd", auto_stopped=True, traces=(TRACE,)), rule=10
    ),
    wire.CommandOutcome(outcome=Skipped(Reason.NOT_PRIMARY), rule=6),
    wire.CommandOutcome(outcome=Failed(ErrorKind.ENGINE_ERROR, "what was seen"), rule=10),
    wire.ResendRequest(first=8, credit=64),
    wire.DecisionBatch(
        journal="j", first=12, decisions=(agent.Decision(Raw(wire.encode(agent.Tick(at_ms=1))), Raw(wire.encode(()))),)
    ),
    wire.Goodbye(),
    # bus to agent
    wire.Welcome(run="run-1", publish_port=5556, heartbeat_ms=2000, lease_ms=60_000, recorded_decisions=11),
    wire.Snapshot(desired=DESIRED),
    wire.Snapshot(desired=Desired(adapters={"policy": Adapter((ADAPTER,), loading=replace(ADAPTER, version=8))})),
    wire.Replay(records=(wire.CommandRecord(origin=2, seq=7, envelope=ENVELOPE),)),
    wire.Ack(journal="j", through=12),
    wire.Rejoin(reason="say hello", give_up=True),
    wire.PlaceAssigned(replica=3),
    wire.TimeReply(sent_ns=5_000_000_000, received_ns=1_700_000_000_000_000_000, replied_ns=1_700_000_000_000_030_000),
    wire.TimeReply(sent_ns=5_000_000_000, received_ns=1, replied_ns=2, heartbeat_ms=4096),
    # operators
    wire.StatusRequest(),
    wire.PeerRequest(replica=3),
    wire.PeerFound(url=URL, content="c" * 64, digest="sglang:l:d"),
    wire.Retire(places=("3", "1.1")),
    wire.Submit(command=PROFILE, target=commands.Target(), timeout_ms=30_000, force=True),
    wire.SyncRequest(path="global_step_12", version=5, timeout_ms=600_000),
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
                latency_us=1200,
                call_ms=42_000,
                requests=RequestCounts(running=2, waiting=5),
            ),
        ),
        open=("pause (seq 7) waits for 1.0",),
        unproven=(3,),
        failures=(RecentFailure(ago_ms=2500, text="flush (seq 6): 1.0: failed engine_error: what was seen"),),
        read_only=True,
        left_ms=(28_800,),
    ),
    REPORT,
    SyncReport(version=4, status="aborted", loaded=(), quarantined=(), phases=(REPORT,), reason="too few"),
    wire.RequestRejected(reason="not by hand"),
    wire.ReplyPart(part=b"of a status", left=3),
    # events of an agent's machine
    agent.Started(at_ms=1, identity=PLACE, incarnation="i"),
    agent.CommandReceived(at_ms=2, epoch=3, origin=2, seq=7, ttl_ms=900, command=PROFILE, target=commands.Target()),
    agent.HeadSeen(at_ms=3, epoch=3, seq=9),
    agent.SnapshotReceived(at_ms=4, epoch=3, seq=9, desired=DESIRED),
    agent.EngineObserved(at_ms=5, observation=OBSERVATION),
    agent.EngineReturned(
        at_ms=6, call_id=1, result=agent.Returned(digest="dd", traces=(TRACE,)), observation=OBSERVATION
    ),
    agent.EngineReturned(at_ms=6, call_id=2, result=agent.Fault("engine_error", "no")),
    agent.EngineObserved(at_ms=6, observation=replace(OBSERVATION, adapters={"policy-v7": "adapters/step_7"})),
    agent.LeaseExpired(at_ms=7),
    agent.Tick(at_ms=8),
    agent.Tick(at_ms=8, stacks="The stacks are in a file."),
    agent.Stopping(at_ms=9),
    agent.FaultInjected(at_ms=9, name="dies at load", what="kill_agent"),
    # its effects
    agent.Perform(call_id=1, call=agent.CheckSource(SOURCE, MANIFEST, 5)),
    agent.Perform(call_id=2, call=agent.Pause("wait")),
    agent.Perform(call_id=3, call=agent.Resume()),
    agent.Perform(call_id=4, call=agent.Sleep(frozenset({"weights"}))),
    agent.Perform(call_id=5, call=agent.Wake(frozenset({"kv_cache", "weights"}))),
    agent.Perform(call_id=6, call=agent.Load(5, SOURCE, MANIFEST)),
    agent.Perform(call_id=7, call=agent.Flush()),
    agent.Perform(call_id=8, call=agent.Abort()),
    agent.Perform(call_id=9, call=agent.StartProfile(SESSION, "global_step_3/replica_1")),
    agent.Perform(call_id=10, call=agent.StopProfile(SESSION, "global_step_3/replica_1")),
    agent.Perform(call_id=11, call=agent.AwaitPush(5, PUSHED, None)),
    agent.Perform(call_id=12, call=agent.Observe()),
    agent.Perform(call_id=13, call=agent.Load(5, commands.Checkpoint(PUSHED.path), None, PUSHED.label)),
    agent.Perform(call_id=14, call=agent.Restore("/models/policy")),
    agent.Perform(call_id=15, call=agent.CheckAdapter(ADAPTER)),
    agent.Perform(call_id=16, call=agent.LoadAdapter(ADAPTER)),
    agent.Perform(call_id=17, call=agent.UnloadAdapter("policy-v5", waited=True)),
    agent.Perform(call_id=18, call=agent.AwaitIdle(30_000)),
    agent.Answer(epoch=2, seq=7, outcome=Skipped(Reason.ALREADY), rule=10),
    agent.RequestResend(8),
    agent.RequestSnapshot(),
    agent.Restart(),
    # events of the coordinator
    bus.Opened(
        at_us=1,
        at_ns=2,
        run="run-1",
        settings=bus.CoordinatorSettings(
            heartbeat_ms=2000,
            agent_timeout_ms=10_000,
            lease_ms=60_000,
            history=1024,
            retransmit_ms=1000,
            publish_port=5556,
        ),
        logic=1,
    ),
    bus.Issued(at_us=2, at_ns=3, ticket=1, command=PROFILE, target=commands.Target(), timeout_ms=30_000, operator=True),
    bus.SyncRequested(
        at_us=3,
        at_ns=4,
        ticket=2,
        version=5,
        source=SOURCE,
        manifest=MANIFEST,
        in_flight="keep",
        quorum=2,
        target=commands.Target(replicas=frozenset({1, 0})),
        timeout_ms=600_000,
        on_unreachable="wait",
    ),
    bus.SyncRequested(
        at_us=3,
        at_ns=4,
        ticket=3,
        version=None,
        source=SOURCE,
        manifest=MANIFEST,
        in_flight="abort",
        quorum=None,
        target=commands.Target(),
        timeout_ms=600_000,
        adapter=commands.AdapterRequest(name="policy", config="cc", base=5, keep=3),
    ),
    bus.LeaveRequested(at_us=3, at_ns=4, peer="1.0/i", grace_ms=30_000),
    bus.PlaceRequested(at_us=3, at_ns=4, peer=f"auto/{TOKEN}/00", token=TOKEN),
    bus.RetireRequested(at_us=3, at_ns=4, ticket=3, places=("3", "1.1")),
    bus.SamplesCounted(
        at_us=3,
        at_ns=4,
        step=12,
        counts=(
            bus.SampleCount(
                adapter="policy", version=7, staleness=1, proof="proven", accepted=True, sequences=64, tokens=9_000
            ),
            bus.SampleCount(version=None, staleness=None, proof="unknown", accepted=False, sequences=1, tokens=20),
        ),
    ),
    bus.HelloReceived(
        at_us=4,
        peer="1.0/i",
        hello=wire.Hello(identity=PLACE, incarnation="i", journal="j", host="node-1", pid=4242),
        recorded_decisions=11,
    ),
    bus.JoinReceived(at_us=5, peer="1.0/i"),
    bus.StatusReceived(at_us=6, peer="1.0/i", seq=7, status=STATUS),
    bus.AnswersReceived(
        at_us=7, answers=(bus.PeerAnswer(peer="1.0/i", origin=2, seq=7, outcome=Skipped(Reason.ALREADY), rule=10),)
    ),
    bus.ResendRequested(at_us=8, peer="1.0/i", first=3, credit=64),
    bus.PeerLost(at_us=9, peer="1.0/i", reason="silent"),
    bus.SendFailed(at_us=9, at_ns=10, ticket=4, reason="RuntimeError: no group"),
    bus.SendReturned(at_us=9, at_ns=10, ticket=4),
    bus.TimerFired(at_us=10),
    bus.Closed(at_us=11, at_ns=12),
    # its effects
    bus.Publish(epoch=2, seq=7, envelope=ENVELOPE),
    bus.Send(peer="1.0/i", epoch=2, seq=7, message=wire.Ack(journal="j", through=12)),
    bus.Ping(peer="1.0/i"),
    bus.Conclude(ticket=1, report=REPORT),
    bus.Conclude(
        ticket=2, report=SyncReport(version=5, status="committed", loaded=(1,), quarantined=(0,), phases=(REPORT,))
    ),
    bus.Conclude(
        ticket=3,
        report=SyncReport(version=6, status="committed", loaded=(1,), quarantined=(), phases=(AWAY,), unproven=(3,)),
    ),
    bus.Refuse(ticket=3, kind="sync_in_progress", reason="one at a time"),
    bus.Retired(ticket=4, agents=("3.0", "3.1")),
    bus.Retired(ticket=None, agents=("3.0", "3.1")),
)


def named() -> dict[str, Struct]:
    """Return the samples by name: the kind, and a number if there are several of it."""
    samples: dict[str, Struct] = {}
    for sample in SAMPLES:
        name = type(sample).__name__
        number = sum(other.partition(" ")[0] == name for other in samples)
        samples[f"{name} {number + 1}" if number else name] = sample
    return samples


def main() -> None:
    """Write wire.json: the bytes of each sample, and the same for people to read; a line for each."""
    vectors = {}
    for name, sample in named().items():
        encoded = wire.encode(sample)
        vectors[name] = {"value": msgspec.to_builtins(msgspec.msgpack.decode(encoded)), "hex": encoded.hex()}
    lines = [f"{json.dumps(name)}: {json.dumps(vector)}" for name, vector in vectors.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
