"""Settings of the bus and of an agent.

The defaults suit a run of some thousand agents on one network. An unknown key is an error that names it.
"""

from typing import Literal

from msgspec import Struct

from schemas.identity import Positive


class BusConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the bus in the trainer.

    Attributes:
        head_interval_ms: Time between two head beacons.
        heartbeat_ms: Time between two heartbeats of an agent.
        agent_timeout_ms: An agent that is silent for this long has left the fleet.
        lease_ms: Agents that hear nothing from the bus for this long continue without the trainer.
        history: Commands kept for resending. An agent that needs older ones gets a snapshot.
        queue: Commands that may be open at once: handed to the bus, and not concluded yet. More raise BusOverloaded.
        retransmit_ms: Time until an unanswered command is sent again; doubles with each attempt.
        durability: `disk` flushes a group of records to the disk before it is published; `os` leaves that to the
            operating system, so a power cut may lose the last groups.
    """

    head_interval_ms: Positive = 1_000
    heartbeat_ms: Positive = 2_000
    agent_timeout_ms: Positive = 10_000
    lease_ms: Positive = 60_000
    history: Positive = 1_024
    queue: Positive = 4_096
    retransmit_ms: Positive = 1_000
    durability: Literal["disk", "os"] = "os"


class AgentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an agent. Heartbeat and lease come from the bus.

    Attributes:
        hello_retry_ms: First pause before the agent says hello again; doubles, with jitter, up to 4 s.
        observe_ms: Time between two readings of the engine's state while no call runs.
        reconcile_timeout_ms: Deadline of an engine call that belongs to no command.
        batch: Most decisions sent to the log in one message.
        durability: Of the journal, as in `BusConfig`.
    """

    hello_retry_ms: Positive = 200
    observe_ms: Positive = 1_000
    reconcile_timeout_ms: Positive = 600_000
    batch: Positive = 256
    durability: Literal["disk", "os"] = "os"
