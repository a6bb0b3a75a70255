"""Judges of what the trainer and its operators read of the fleet: the status, who gets requests, which weights made a
sample, what keeps a replica from serving.

Once in a second all of it is read, and compared with the log and with what the engines really hold. Reading changes
nothing, and draws from a luck of its own. Each function yields what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from controlplane.machine.fleet_view import FleetView
from controlplane.machine.permissions import Grant, refusal
from controlplane.machine.provenance import Provenance, accepts
from controlplane.machine.replicas import all_serve, not_ready_reasons
from controlplane.machine.status import OPEN_MAX, WAITS_FOR_MAX, fleet_status
from controlplane.simulate.modelled_engine import LAUNCH_LABEL
from schemas.commands import AdapterSync, WeightSync, durable_source
from schemas.errors import ConfigError
from schemas.formatting import agent_order
from schemas.identity import replica_and_node
from schemas.reports import FleetStatus
from schemas.wire import Retire, StatusRequest, Upward
from tests.simulation import leaving, model, serving, verdicts
from tests.simulation.engine import LAUNCHED, Engine, weights_of, weights_to_serve
from workers.link.heartbeat import status_of

if TYPE_CHECKING:
    from tests.simulation.agent import Process
    from tests.simulation.bus import Bus
    from tests.simulation.promises import Promises
    from tests.simulation.slot import Slot

SHAPES: Final = ("spans", "choices", "object", "whole", "verl")


def look(bus: Bus) -> None:
    """Read all that can be read of the fleet."""
    world = bus.world
    if bus is not world.bus or not bus.alive:
        return
    for judges, promise in (
        (model.differs, "P4 late joiner"),
        (_status, "P11 true"),
        (_requests, "P11 true"),
        (_reasons, "P11 true"),
        (_samples, "I15"),
    ):
        for wrong in judges(bus):
            world.promises.broken(promise, wrong)


# --- the status -------------------------------------------------------------------------------------------------------


def _status(bus: Bus) -> Iterator[str]:
    world, now_us = bus.world, bus.now_us
    status = fleet_status(bus.state, now_us, "log", bus.inbox.last_heard_us, wall_ns=world.now * 1_000_000)
    yield from _lines(bus, status)
    yield from _open(bus, status)
    commits = [found for found in world.promises.log.values() if _is_commit(found.command)]
    newest = max((found.command.version for found in commits), default=0)  # type: ignore[union-attr]
    whole = max((found.command.version for found in commits if found.target.replicas is None), default=0)  # type: ignore[union-attr]
    if not whole <= status.version <= newest:
        yield f"the status says v{status.version}, committed is v{newest}"
    view = FleetView(bus.state)
    if view.has_committed != (whole > 0):
        yield f"{view.has_committed}: a sync of the whole fleet was committed, v{whole}"
    if status.unproven != tuple(sorted(status.unproven)) or set(status.unproven) & set(view.serving):
        yield f"{status.unproven} are not proven to hold what they should, and {view.serving} serve"
    syncing = {place.unit for place in world.promises.identities.values() if verdicts.syncs(place)}
    units = (syncing & {world.slot(name).identity.unit for name in world.promises.known}) - world.promises.leaving
    for weights in (bus.state.desired.get(unit, bus.state.default_desired).committed for unit in units):
        source = durable_source(weights.source) if weights is not None else None
        if source is not None and source.path not in view.needed_checkpoints:
            yield f"replicas may load {source}, and needed are {view.needed_checkpoints}"
    for replica, version in view.serving.items():
        told = _told(bus, f"{replica}.0")
        if told is not None and _stands_still(told[1], told[2]):
            yield f"replica {replica} is paused, and is said to serve v{version}"


def _stands_still(process: Process, engine: Engine) -> bool:
    """Whether an engine is paused, and its agent has nothing to do with it and no trouble."""
    state, weather = process.state, process.world.weather
    others = process.lease_over or state.changed_by_others or weather.doubles or weather.successors
    busy = state.activity is not None or state.queue or engine.attempt is not None or others
    return engine.paused and not (busy or state.reconcile_blocked or state.needs_snapshot or engine.memory == "trainer")


def _is_commit(command: object) -> bool:
    return isinstance(command, WeightSync) and command.phase == "commit"


def _lines(bus: Bus, status: FleetStatus) -> Iterator[str]:
    world, known = bus.world, bus.world.promises.known
    lines = {line.agent: line for line in status.agents}
    if missing := known.keys() - lines.keys():
        yield f"the status does not name {sorted(missing)}"
    if any(line.state != "joining" and name not in known for name, line in lines.items()):
        yield f"the status names {sorted(lines.keys() - known.keys())}, which never joined"
    unproven = [replica_and_node(line.agent) for line in status.agents]
    first = [place is not None and place[0] in status.unproven for place in unproven]
    if first != sorted(first, reverse=True):
        yield f"replicas {status.unproven} are not proven, and not the first: {[line.agent for line in status.agents]}"
    served = {replica_and_node(line.agent): line.serving for line in status.agents if line.serving is not None}
    if {(replica, 0): version for replica, version in FleetView(bus.state).serving.items()} != served:
        yield f"the status says that {served} serve"
    for name, line in lines.items():
        if (line.state == "live") != bool(known.get(name)) or (line.away_ms and line.state == "live"):
            yield f"{name} is {line.state}, away for {line.away_ms} ms, and known: {known.get(name)}"
        if line.away_ms > world.now:
            yield f"{name} is away for {line.away_ms} ms, the run goes on for {world.now} ms"
        member, slot = bus.state.members[name], world.slot(name)
        silent_us = bus.now_us - bus.inbox.last_heard_us.get(member.peer, bus.now_us)
        if line.silent_ms != silent_us // 1000:
            yield f"{name} is said to be silent for {line.silent_ms} ms, it is for {silent_us} us"
        yield from _newer(bus, status, name)
        said = line.status
        if said is None or slot.process is None or slot.process.peer != member.peer or said.since_ms is None:
            if line.call_ms is not None and (said is None or said.since_ms is None or line.state in ("gone", "left")):
                yield f"{name} has no call under way, and it takes {line.call_ms} ms"
        elif line.state in ("joining", "live") and line.call_ms != slot.process.since(said.since_ms):
            yield f"{name} has called since {said.since_ms}, and it takes {line.call_ms} ms"


def _newer(bus: Bus, status: FleetStatus, name: str) -> Iterator[str]:
    """What the bus knows beyond the newest heartbeat is said, and only then."""
    line = next(line for line in status.agents if line.agent == name)
    said, place = line.status, replica_and_node(name)
    if said is None or line.state != "live" or place is None or place[1]:
        if line.newer:
            yield f"{name}, {line.state}, is said to be {line.newer}"
        return
    serves = said.ready and said.generating
    desired = bus.state.desired.get(place[0], bus.state.default_desired)
    if line.serving is not None:
        known = serves and said.version == line.serving
        if bool(line.newer) == known or (line.newer and f"v{line.serving}," not in line.newer):
            yield f"{name} serves v{line.serving}, said {said}, and is shown as {line.newer!r}"
    elif serves != bool(line.newer) and (not serves or not desired.serving):
        yield f"{name} said {said}, {desired} is desired, and it is shown as {line.newer!r}"


def _open(bus: Bus, status: FleetStatus) -> Iterator[str]:
    """Each command that is not concluded is named, with those that it waits for and the time that it has: that of a
    load ends sooner once its sender has returned, which may be being written.
    """
    promises, held = bus.world.promises, bus.state.sync is not None and bus.state.sync.held_until_us is not None
    silent = [seq for seq, found in promises.log.items() if (found.origin, seq) not in promises.concluded]
    named, more = silent[:OPEN_MAX], len(silent) > OPEN_MAX
    if len(status.open) != len(named) + held + more:
        yield f"the status names {status.open}, open are {silent}"
    if len(status.left_ms) != len(named) + held:
        yield f"the status has {len(status.left_ms)} times for {status.open}"
    waits = {line.agent: "".join(line.waits_for) for line in status.agents}
    full = [line.agent for line in status.agents if len(line.waits_for) >= WAITS_FOR_MAX]
    for seq, text, left_ms in zip(named, status.open, status.left_ms, strict=False):
        found, live = promises.log[seq], [name for name, waiting in waits.items() if f"(seq {seq})" in waiting]
        if f"(seq {seq})" not in text or not (live or full):
            yield f"the status says {text}, and seq {seq} waits for {live}"
        first = min(live, key=agent_order, default="")
        if not set(live) <= found.live or (first not in text and not full):
            yield f"seq {seq} was for {sorted(found.live)}, and waits for {live}: {text}"
        owed = {
            name
            for name in found.live - found.may_lack - set(full)
            if (found.origin, seq) not in _answered(promises, name)
            and promises.known.get(name)
            and promises.since.get(name, 0) <= found.at_ms
        }
        if not owed <= set(live):
            yield f"{sorted(owed)} have not answered seq {seq}, and it waits for {live}"
        sent = bus.committing is not None and bus.state.sync is not None and seq == bus.state.sync.seq
        if not sent and abs(left_ms - max(0, found.deadline_us - bus.now_us) // 1000) > bus.late_us // 1000:
            yield f"seq {seq} has {left_ms} ms left, by its deadline {(found.deadline_us - bus.now_us) // 1000}"


def _answered(promises: Promises, name: str) -> dict[tuple[int, int], Any]:
    return promises.world.slot(name).ledger.answered


# --- who gets requests ------------------------------------------------------------------------------------------------


def _told(bus: Bus, name: str) -> tuple[Slot, Process, Engine] | None:
    """The place whose agent is connected to this bus, if it knows its engine."""
    slot, member = bus.world.slot(name), bus.state.members.get(name)
    process, engine = slot.process, slot.engine
    if process is None or engine is None or member is None or process.peer != member.peer or serving.misled(process):
        return None
    return slot, process, engine


def _requests(bus: Bus) -> Iterator[str]:
    """A replica gets requests if its agent is live, and it generates on nothing but what is committed."""
    view, promises = FleetView(bus.state), bus.world.promises
    for slot in bus.world.slots:
        place = slot.identity
        if place.role != "rollout" or place.node_rank or slot.double:
            continue
        reason, name = view.unfit(place.replica), slot.name
        desired = bus.state.desired.get(place.replica, bus.state.default_desired)
        if reason and place.replica in view.serving:
            yield f"{name} serves and gets no requests: {reason}"
        if not reason and (name in promises.retired or not promises.known.get(name) or desired.quarantined):
            yield f"{name} gets requests, known: {promises.known.get(name)}, quarantined: {desired.quarantined}"
        told = _told(bus, name)
        if reason or told is None or not told[2].generating or not verdicts.syncs(place):
            continue
        held = told[2].weights
        if told[2].attempt is None and held not in (LAUNCHED, weights_to_serve(desired, held), told[2].before_run):
            yield f"{name} gets requests, on {held}"


# --- what keeps a replica from serving --------------------------------------------------------------------------------


def _reasons(bus: Bus) -> Iterator[str]:
    """Each agent that does not serve is named with a reason, and no other."""
    promises, reasons = bus.world.promises, not_ready_reasons(bus.state, -1)
    if list(reasons) != sorted(reasons, key=agent_order):
        yield f"they are not in order: {list(reasons)}"
    staying = leaving.staying(promises)
    live = [name for name, is_live in staying.items() if is_live]
    if missing := [name for name, is_live in staying.items() if not is_live and name not in reasons]:
        yield f"{missing} are away, and nothing is said of it"
    ready = not any(name in reasons for name in live)
    if all_serve(bus.state, len(live), -1) != ready or all_serve(bus.state, len(live) + 1, -1):
        yield f"{len(live)} agents are live, and of these not ready: {reasons}"
    for name in live:
        member, told = bus.state.members[name], _told(bus, name)
        place = replica_and_node(name)
        if member.status is None:
            if name not in reasons:
                yield f"{name} has sent no heartbeat, and nothing is said of it"
            continue
        if place is None or place[1]:
            if name in reasons:
                yield f"{name} has no engine of a replica, and keeps it from serving: {reasons[name]}"
            continue
        serves = member.status.ready and member.status.generating
        if name not in reasons and not serves:
            yield f"{name} said {member.status}, and nothing is said of it"
        if told is None or status_of(told[1].state, told[1].clock) != member.status or not serves:
            continue
        desired = bus.state.desired.get(place[0], bus.state.default_desired)
        if told[1].state.desired == desired and name in reasons:
            yield f"{name} serves what is desired, and is said not to: {reasons[name]}"


# --- samples ----------------------------------------------------------------------------------------------------------


def _samples(bus: Bus) -> Iterator[str]:
    """An engine answers a request; what the trainer is told of the answer is true."""
    world, view = bus.world, FleetView(bus.state)
    for slot in world.slots:
        engine = slot.engine
        if engine is None or slot.double or slot.identity.role != "rollout" or not (engine.ready and engine.generating):
            continue
        tokens, cut = world.watching.randrange(1, 50), world.watching.randrange(50)
        labels = [(engine.label or "", tokens)]
        if 0 < cut < tokens and engine.label is not None:
            labels = [(LAUNCH_LABEL, cut), (engine.label, tokens)]
        shape = world.watching.choice(SHAPES)
        answer = answer_of(shape, labels if engine.label is not None else [])
        try:
            (made,) = view.provenance(answer, replica=slot.identity.replica)
        except ConfigError as error:
            if engine.label is not None or "which weights" not in str(error):
                yield f"{slot.name} answers {answer}, which can't be read: {error}"
            continue
        if engine.label is None:
            yield f"{slot.name} names no weights, and is said to answer with {made}"
            continue
        yield from _made(bus, slot, engine, made, labels, shape)
    yield from _adapted(bus, view)


def answer_of(shape: str, labels: list[tuple[str, int]]) -> Any:
    """Return an engine's answer whose tokens were made under these labels, each up to an end. Shapes without spans say
    the newest label, or the first and the last.
    """
    tokens = labels[-1][1] if labels else 7
    begins = [0, *(end for _, end in labels)]
    spans = [
        {"version": label, "start": begin, "end": end} for (label, end), begin in zip(labels, begins, strict=False)
    ]
    ids = list(range(tokens))
    match shape:
        case "spans":
            return {"text": "", "meta_info": {"completion_tokens": tokens, "weight_versions": spans or None}}
        case "choices":
            return {
                "model": "base",
                "choices": [{"weight_versions": spans or None}],
                "usage": {"completion_tokens": tokens},
            }
        case "object":
            objects = [SimpleNamespace(**span) for span in spans]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, weight_versions=objects or None)])
        case "whole":
            label = {"weight_version": labels[-1][0]} if labels else {}
            return [{"choices": [{}], "metadata": label, "usage": {"completion_tokens": tokens}}]
        case _:
            said = {"min_global_steps": labels[0][0], "max_global_steps": labels[-1][0]} if labels else {}
            return {"token_ids": ids, "extra_fields": said}


def _made(
    bus: Bus, slot: Slot, engine: Engine, made: Provenance, labels: list[tuple[str, int]], shape: str
) -> Iterator[str]:
    tokens = labels[-1][1]
    if shape == "whole" or (shape == "verl" and labels[0][0] == labels[-1][0]):
        labels = labels[-1:]
    elif shape == "verl":
        labels = [(labels[0][0], tokens), labels[-1]]  # all tokens count as made by the older weights
    if [(span.label, span.end) for span in made.spans] != labels or made.tokens != tokens or made.adapter:
        yield f"{slot.name} answered with {labels}, and is said to have answered with {made}"
    if [span.begin for span in made.spans] != [0, *(end for _, end in labels)][: len(labels)]:
        yield f"{slot.name} answered with {labels}, there are gaps in {made}"
    if made.mixed != (len({label for label, _ in labels}) > 1):
        yield f"{slot.name} answered with {labels}, and that is mixed: {made.mixed}"
    span, replica = made.spans[-1], slot.identity.replica
    commits = bus.world.promises.commits()
    newest = max((commit.version for commit in commits), default=0)
    if span.version is not None and span.staleness != max(0, newest - span.version):
        yield f"v{span.version} is {span.staleness} versions behind v{newest}"
    sources = [commit.source for commit in commits if commit.version == span.version]
    held = engine.weights
    told, place = bus.world.sampler.launched_under(bus), (replica, span.label)
    made_it = any(source is not None and weights_of(source) == held for source in sources)
    if span.proof == "proven" and not made_it and (held != LAUNCHED or place in told):
        yield f"{slot.name} is proven to answer with v{span.version}, and has {held}"
    if span.proof == "launch" and (commits or engine.label != LAUNCH_LABEL):
        yield f"{slot.name} is said to answer with the weights of its launch, {held}, committed is v{newest}"
    fit = accepts(made, max_staleness=0)
    if bool(fit) and (made.staleness != 0 or made.proof not in ("proven", "launch")):
        yield f"a sample is taken, {made}"
    if not fit and not made.mixed and made.staleness == 0 and made.proof in ("proven", "launch"):
        yield f"a sample is not taken, {made}: {fit.reason}"
    served = FleetView(bus.state).serving.get(replica)
    ever_told = any(place in places for places in bus.world.sampler.told.values())
    if served and sources and span.version == served and span.proof != "proven" and not ever_told:
        yield f"replica {replica} is proven to serve v{served}, and its sample is {span.proof}"


def _adapted(bus: Bus, view: FleetView) -> Iterator[str]:
    """A sample that a replica made with an adapter, which it is listed for, is proven to be of that version."""
    for name, status in view.adapters.items():
        commits = (found.command for found in bus.world.promises.log.values())
        newest = max(
            command.adapter.version
            for command in commits
            if isinstance(command, AdapterSync) and command.phase == "commit" and command.adapter.name == name
        )
        for replica in status.replicas:
            (made,) = view.provenance(
                {"model": status.model, "choices": [{}], "usage": {"completion_tokens": 5}}, replica=replica
            )
            if (made.adapter, made.proof, made.tokens, made.staleness) != (name, "proven", 5, newest - status.version):
                yield f"replica {replica} is listed for {status.model}, and its sample is {made}"
        if not 0 < status.oldest <= status.version:
            yield f"the oldest version of {status.model} is {status.oldest}"


# --- keys -------------------------------------------------------------------------------------------------------------


def key(process: Process, message: Upward) -> str:
    """P10: the key of an agent lets it send what agents send, in its own name only."""
    place = process.slot.identity
    places = ((), (place.agent,), (str(place.unit),), ("77", place.agent))[place.node_rank + process.connection & 3]
    grant = Grant(name="key", role="agent", places=places)
    if refused := refusal(grant, message, place.agent):
        return f"{process.peer} may not send {message}: {refused}"
    if places and not refusal(grant, message, f"{place.unit}7.0"):
        return f"the key of {places} is good for {place.unit}7.0"
    operator, observer = Grant(name="key", role="operator"), Grant(name="key", role="observer")
    if not (refusal(grant, Retire(places=("0",)), None) and refusal(operator, message, place.agent)):
        return "a key is good for what another role may do"
    reads = refusal(observer, StatusRequest(), None)
    return f"an observer may not read: {reads}" if reads else ""
