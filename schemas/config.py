"""Settings of the bus and of an agent, and their bounds.

The defaults suit a run of some thousand agents on one network. An unknown key is an error that names it.
"""

from typing import Annotated, Final, Literal, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from schemas.errors import ConfigError
from schemas.identity import TIME_MAX_MS, Memory, Milliseconds, OnLostBus, Port

_Interval = Annotated[int, Meta(ge=1, le=3_600_000)]
"""Of something that is done again and again: an hour at most, so that the bus or the agent is seen to live."""
_Kept = Annotated[int, Meta(ge=1, le=65_536)]
"""Messages or records that are kept in memory."""


class ObservePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long replicas that are only observed may be in a state before that is a finding.

    Attributes:
        torn_ms: Replicas that serve are on different weights, as while a trainer updates one after the other.
        paused_ms: A replica is paused, and does not resume.
        profiling_ms: A profiling session is open, and is not stopped.
    """

    torn_ms: Milliseconds = 60_000
    paused_ms: Milliseconds = 600_000
    profiling_ms: Milliseconds = 600_000


class BusConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the bus in the trainer.

    Attributes:
        head_interval_ms: Time between two head beacons.
        heartbeat_ms: Time between two heartbeats of an agent. Longer in a fleet of more than a thousand for each
            second of it, up to half of `agent_timeout_ms`.
        agent_timeout_ms: An agent that is silent for this long counts as gone.
        lease_ms: Agents that hear nothing from the bus for this long continue without the trainer.
        history: Commands kept for resending. An agent that needs older ones gets a snapshot.
        queue: Commands that may be open at once: handed to the bus, and not concluded yet. More raise BusOverloaded.
        retransmit_ms: Time until an unanswered command is sent again; doubles with each attempt.
        after_send_ms: What is left of the load phase of a sync once `send` has returned. A sender may return before its
            receivers have copied everything (NCCL's does), and they still have to check what they hold. But a sender
            that returned without sending must not stop the fleet for the whole timeout.
        publish_port: TCP port of the publish socket, on the host of the bus's address. None lets the system choose;
            name one for a firewall.
        agents_max: Places in the fleet, of agents that are there or gone. An agent at a further place is turned away.
        durability: `disk` flushes a group of records to the disk before it is published; `os` leaves that to the
            operating system, so a power cut may lose the last groups.
        log_bytes_max: Size to which the log is kept, about: its oldest records are dropped. None keeps all.
        log_age_max_s: Age from which records are dropped, about. None keeps all.
        log_copy: Folder, which other machines share, of a live copy of the log. A command is published once it is there
            too. A bus that opens with the same folder, on any machine, goes on with the run where the copy ends.
        address_file: File that the bus writes its address to once it is open, for agents and operators whose `--bus`
            names the file. They read it again whenever their bus does not answer.
        observe: This bus observes a run that another trainer drives: it lets in observing agents only. None for a bus
            that commands.
    """

    head_interval_ms: _Interval = 1_000
    heartbeat_ms: _Interval = 2_000
    agent_timeout_ms: Milliseconds = 10_000
    lease_ms: Milliseconds = 60_000
    history: _Kept = 1_024
    queue: _Kept = 4_096
    retransmit_ms: Milliseconds = 1_000
    after_send_ms: Milliseconds = 10_000
    publish_port: Port | None = None
    agents_max: _Kept = 8_192
    durability: Literal["disk", "os"] = "os"
    log_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] | None = None
    log_age_max_s: Annotated[int, Meta(ge=60, le=1 << 32)] | None = None
    log_copy: str | None = None
    address_file: str | None = None
    observe: ObservePolicy | None = None


class AgentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an agent. Heartbeat and lease come from the bus.

    Attributes:
        hello_retry_ms: First pause before the agent says hello again; doubles, with jitter, up to 4 s.
        observe_ms: Time between two readings of the engine's state while no call runs.
        reconcile_timeout_ms: Deadline of an engine call that belongs to no command.
        batch: Most decisions sent to the log in one message.
        durability: Of the journal, as in `BusConfig`.
        on_lost_bus: What the engine does once its agent has heard nothing from the bus for a lease: `serve` continues
            on the committed weights, `pause` stops until a bus is back. The replica leaves its router in both cases.
        memory: `trainer` if the trainer's own data plane releases the engine's memory and takes it back. Then sleep and
            wake commands are `failed(unsupported)`. While the memory is released, the agent makes no call that was not
            commanded, and the replica stays ready. The trainer takes it back before it commits.
        wedged_after_s: An engine whose running requests produce no token for this long is not ready.
        rejoin: Take up the agent's place again if it was retired before this process began. The replica begins as a new
            one does.
    """

    hello_retry_ms: _Interval = 200
    observe_ms: _Interval = 1_000
    reconcile_timeout_ms: Milliseconds = 600_000
    batch: _Kept = 256
    durability: Literal["disk", "os"] = "os"
    on_lost_bus: OnLostBus = "serve"
    memory: Memory = "agent"
    wedged_after_s: Annotated[int, Meta(ge=1, le=TIME_MAX_MS // 1000)] = 300
    rejoin: bool = False


T = TypeVar("T", bound=Struct)

TIMEOUT_MAX_S: Final = TIME_MAX_MS // 1000


def milliseconds(seconds: float, name: str = "timeout") -> int:
    """Return a time as it travels. Raises ConfigError, with its name, if it is not within its bounds."""
    if not 1 <= seconds * 1000 <= TIME_MAX_MS:  # also refuses NaN
        raise ConfigError(f"{name} {seconds!r}: must be between 0.001 and {TIMEOUT_MAX_S} seconds")
    return int(seconds * 1000)


def within_bounds(value: T) -> T:
    """Return `value`. A Struct does not check what Python code builds it of, so this does: raises ConfigError."""
    try:
        return convert(to_builtins(value), type(value))
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"{type(value).__name__}: {complaint(error, value)}") from None


def complaint(error: Exception, value: object) -> str:
    """Return what msgspec says of a Struct, with the field that it complains about, if it is one."""
    text = str(error)
    for name in text.partition(" - at `$.")[2].rstrip("`").split("."):
        value = getattr(value, name, None)
    return text if value is None else f"{text}, which is {str(value)[:100]}"
