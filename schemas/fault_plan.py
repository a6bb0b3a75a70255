"""The faults of a game day: what goes wrong, where and when. What is drawn, is drawn from the seed.

A plan is a TOML file that every agent and training rank of a staging fleet reads. Each works out by itself which faults
are its own and when they are due, from the plan's seed, its place and what it sees of the run, so that the same plan on
the same run does the same.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Final, Literal, NamedTuple, get_args

from msgspec import Meta, Struct

from schemas.commands import AdapterSync, Command, UnknownCommand, WeightSync
from schemas.errors import ConfigError
from schemas.events import Call, CommandReceived, Effect, Event, Perform, SnapshotReceived
from schemas.identity import ROLLOUT, Count, Identity, Name, NodeRank, Positive, ReplicaIndex, Role
from schemas.profiler.conversion import convert_file, did_you_mean, read_toml

OfAgent = Literal["kill_agent", "stop_agent", "cut", "hold", "fill_disk", "jump_clock"]
OfServer = Literal["kill_engine", "kill_both", "stop_engine"]
OfCall = Literal["slow", "lose_answer", "refuse"]
What = Literal[OfAgent, OfServer, OfCall, "label", "kill_trainer"]
Phase = Literal["prepare", "load", "commit", "abort"]
Seconds = Annotated[float, Meta(ge=0, le=86_400, description="a number of seconds, at most a day")]
Share = Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")]

MEANINGS: Final[dict[What, str]] = {
    "kill_agent": "kill -9 of the agent, or of the process that trains; whatever restarts it has to bring it back",
    "kill_engine": "kill -9 of the engine's server and all that it started",
    "kill_both": "kill -9 of the engine's server and of the agent",
    "stop_agent": "stop the agent, or the process that trains (SIGSTOP), for `seconds`; an engine runs on",
    "stop_engine": "stop the engine's server (SIGSTOP) for `seconds`",
    "cut": "cut the agent's connections to the bus for `seconds`",
    "hold": "hold back all that these connections carry for `seconds`, then deliver it: late heartbeats and answers",
    "slow": "an engine call returns `seconds` later",
    "lose_answer": "an engine call is made, and its answer is lost",
    "refuse": "an engine call is refused, and not made",
    "label": "for `seconds` the engine reports its weights under a label that no sync set",
    "fill_disk": "for `seconds` the agent can't write to a disk",
    "jump_clock": "the node's wall clock jumps ahead by `seconds`",
    "kill_trainer": "kill -9 of the trainer that `rolloutctl chaos run` started; it is started again after `seconds`",
}
"""What each fault does, as `rolloutctl chaos explain` prints it."""
OF_CALLS: Final = frozenset(get_args(OfCall))
OF_SERVERS: Final = frozenset(get_args(OfServer))
AT_ONCE: Final = frozenset({"kill_agent", "kill_engine", "kill_both", "lose_answer", "refuse"})
"""Faults without a duration."""
CALL_NAMES: Final = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Call))


class PlannedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault.

    It is due when all that is given of `version`, `phase` and `call` comes together. Without any of them it is due when
    the agent joins the run; a fault of an engine call at the first call.

    Attributes:
        name: In the log, the report and messages.
        what: See `MEANINGS`.
        role: Of which agents: those of engines, or the ranks of this training role.
        replicas: Where; every replica if left out. Of a training role: its ranks.
        random: On so many of these replicas, which the seed picks; on all if left out.
        node: Only on this node of a replica; on node 0 if left out.
        version: During the sync to this version, of the weights or of an adapter.
        phase: When this phase of a sync arrives; `prepare` if only a version is given.
        call: When the agent makes this call into its engine.
        after_s: So much later.
        rate: Only so often, when it is due.
        times: At most so often on each agent; 0 for no limit.
        seconds: How long it lasts.
        connection: Of `cut` and `hold`: `control` carries hellos, heartbeats and answers, `commands` what is published.
    """

    name: Name
    what: What
    role: Role = ROLLOUT
    replicas: tuple[ReplicaIndex, ...] = ()
    random: Positive | None = None
    node: NodeRank = 0
    version: Positive | None = None
    phase: Phase | None = None
    call: str | None = None
    after_s: Seconds = 0.0
    rate: Share = 1.0
    times: Count = 1
    seconds: Seconds = 0.0
    connection: Literal["both", "control", "commands"] = "both"


class FaultPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A game day.

    Attributes:
        seed: Of all that is drawn.
        fault: The faults, each a table `[[fault]]`.
    """

    seed: Count = 0
    fault: tuple[PlannedFault, ...] = ()

    def of(self, identity: Identity) -> tuple[PlannedFault, ...]:
        return tuple(fault for fault in self.fault if identity.replica in self._places(fault, identity))

    def _places(self, fault: PlannedFault, identity: Identity) -> frozenset[int]:
        if fault.what == "kill_trainer" or (fault.role, fault.node) != (identity.role, identity.node_rank):
            return frozenset()
        if fault.random is not None:
            return frozenset(self._draw(fault.name).sample(fault.replicas, fault.random))
        return frozenset(fault.replicas or (identity.replica,))

    def happens(self, fault: PlannedFault, identity: Identity, occasion: "Occasion") -> bool:
        """Return whether a fault with a rate happens at this occasion."""
        return fault.rate == 1 or self._draw(fault.name, identity.agent, occasion).random() < fault.rate

    def _draw(self, *about: object) -> Random:
        return Random(f"{self.seed} {about!r}")


class Occasion(NamedTuple):
    """A moment at which faults may be due.

    Attributes:
        number: Seq of the command, or number of the call.
        phase: Of the sync that arrives, or during which the call is made; None outside syncs.
        version: Of that sync; 0 outside syncs.
        call: The call that is about to be made; empty if none is.
    """

    number: int
    phase: Phase | None = None
    version: int = 0
    call: str = ""


def occasion_of(number: int, sync: WeightSync | AdapterSync | None, call: str = "") -> Occasion:
    """Return the moment of a sync's phase, or of a call that belongs to it; None if it belongs to no sync."""
    if sync is None:
        return Occasion(number, call=call)
    return Occasion(number, sync.phase, sync.adapter.version if isinstance(sync, AdapterSync) else sync.version, call)


def occasions(event: Event, effects: Sequence[Effect], command: Command | UnknownCommand | None) -> Iterator[Occasion]:
    """Yield the moments that one decision of an agent is: a snapshot, a phase of a sync, a call of its `command`."""
    match event:
        case SnapshotReceived():
            yield Occasion(0)
        case CommandReceived(command=WeightSync() | AdapterSync() as received):
            yield occasion_of(event.seq, received)
    sync = command if isinstance(command, WeightSync | AdapterSync) else None
    for effect in effects:
        if isinstance(effect, Perform):
            yield occasion_of(effect.call_id, sync, str(effect.call.__struct_config__.tag))


def is_due(fault: PlannedFault, occasion: Occasion) -> bool:
    """Return whether a fault is due at this occasion, apart from its rate and its limit."""
    if fault.version not in (None, occasion.version):
        return False
    if fault.call is not None or fault.what in OF_CALLS:
        return bool(occasion.call) and fault.call in (None, occasion.call) and fault.phase in (None, occasion.phase)
    if occasion.call:
        return False
    wanted = fault.phase or ("prepare" if fault.version is not None else None)
    return wanted == occasion.phase


def parse_plan(text: str, file: str = "the plan") -> FaultPlan:
    """Read a plan from TOML. Raises ConfigError, which names the file, the key, the value and what is allowed."""
    plan = convert_file(read_toml(text, file), FaultPlan, file)
    for index, fault in enumerate(plan.fault):
        for problem in _problems(fault, plan.fault[:index]):
            raise ConfigError(f"{file}: fault {fault.name!r}: {problem}")
    return plan


def read_plan(file: Path) -> FaultPlan:
    """Read a plan from its file. Raises ConfigError."""
    try:
        return parse_plan(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the fault plan {file} can't be read: {error}") from None


def _problems(fault: PlannedFault, earlier: tuple[PlannedFault, ...]) -> Iterator[str]:
    if any(fault.name == other.name for other in earlier):
        yield "another fault has this name; the log tells them apart by it"
    if fault.role != ROLLOUT:
        yield from _problems_of_ranks(fault)
    if fault.call is not None and fault.call not in CALL_NAMES:
        known = ", ".join(sorted(CALL_NAMES))
        yield f"call is {fault.call!r}: allowed is one of {known}{did_you_mean(fault.call, CALL_NAMES)}"
    if fault.random is not None and fault.random > len(fault.replicas):
        yield f"random is {fault.random} and replicas names {len(fault.replicas)}: name those that it picks from"
    if (fault.seconds > 0) == (fault.what in AT_ONCE):
        takes = "it takes no seconds" if fault.what in AT_ONCE else "say for how many seconds"
        yield f"what is {fault.what!r}: {takes}"
    if fault.connection != "both" and fault.what not in ("cut", "hold"):
        yield f"connection has no effect on {fault.what!r}"
    if fault.after_s and fault.what in OF_CALLS:
        yield f"after_s has no effect on {fault.what!r}: it happens in a call"
    if fault.what == "kill_trainer":
        yield from _problems_of_trainers(fault)


def _problems_of_ranks(fault: PlannedFault) -> Iterator[str]:
    if fault.what in OF_SERVERS or fault.what == "label":
        yield f"what is {fault.what!r}: a training rank has no engine"
    if fault.node:
        yield f"node is {fault.node}: a training rank has one node"
    if fault.call is not None and not fault.call.endswith("_profile"):
        yield f"call is {fault.call!r}: training ranks are asked for profiles alone (start_profile, stop_profile …)"


def _problems_of_trainers(fault: PlannedFault) -> Iterator[str]:
    if fault.role != ROLLOUT or fault.replicas or fault.random or fault.call or fault.node:
        yield "the trainer has no replicas and makes no calls: a version, a phase and after_s say when"
    if fault.version is None and fault.phase is None:
        yield "say a version or a phase: the trainer joins nothing"
    if (fault.rate, fault.times) != (1, 1):
        yield "the trainer is killed once: it has no rate and no times"


# --- for people -------------------------------------------------------------------------------------------------------


def described(plan: FaultPlan, fault: PlannedFault) -> str:
    """Return a sentence on what happens, where, when and how often."""
    if fault.what == "kill_trainer":
        where = ""
    elif fault.random is not None:
        picked = sorted(plan._draw(fault.name).sample(fault.replicas, fault.random))
        where = f", on {_listed(fault, picked)} (of {_listed(fault, fault.replicas)})"
    else:
        where = f", on {_listed(fault, fault.replicas)}"
    node = f", node {fault.node}" if fault.node else ""
    lasts = f" ({fault.seconds:g} s)" if fault.seconds else ""
    over = f", {fault.connection} only" if fault.connection != "both" else ""
    return f"{fault.name}: {fault.what}{lasts}{over}{where}{node}, {_when(fault)}{_often(fault)}"


def _listed(fault: PlannedFault, places: Sequence[int]) -> str:
    unit = "replica" if fault.role == ROLLOUT else f"{fault.role} rank"
    return f"{unit}{'' if len(places) == 1 else 's'} {', '.join(map(str, places))}" if places else f"every {unit}"


def _when(fault: PlannedFault) -> str:
    later = f"{fault.after_s:g} s after " if fault.after_s else "at "
    sync = f" of the sync to v{fault.version}" if fault.version is not None else " of a sync"
    if fault.call is not None or fault.what in OF_CALLS:
        any_call = "a call into the " + ("engine" if fault.role == ROLLOUT else "profiler")
        call = f"the call {fault.call}" if fault.call is not None else any_call
        version = f" in the sync to v{fault.version}" if fault.version is not None else ""
        return f"{later}{call} in the {fault.phase}{sync}" if fault.phase is not None else f"{later}{call}{version}"
    if fault.phase is None and fault.version is None:
        return f"{later}joining the run"
    return f"{later}the {fault.phase or 'prepare'}{sync}"


def _often(fault: PlannedFault) -> str:
    if fault.what == "kill_trainer":
        return ""
    chance = f", with a chance of {fault.rate:g} each time" if fault.rate < 1 else ""
    limits = {0: ", without a limit", 1: ", once for each agent"}
    return chance + limits.get(fault.times, f", at most {fault.times} times for each agent")
