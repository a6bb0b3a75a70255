"""Settings of the two processes. Strict: an unknown key is an error that names it.

Each has a default that is right for a run of some thousand agents on one network; times are in the unit of the name.
"""

from typing import Literal

from msgspec import Struct

from schemas.identity import Positive


class BusConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the trainer's side behaves.

    head_interval_ms: between two head beacons.   heartbeat_ms: asked of the agents.   agent_timeout_ms: silence after
    which an agent is out of the fleet.   lease_ms: silence of the bus after which agents go on without the trainer.
    history: commands kept for replay; an agent that lacks older ones gets a snapshot.   queue: commands the trainer may
    hand over faster than they are recorded.   retransmit_ms: first repetition of a command that was not answered.
    durability: `disk` flushes a group of records before it is published; `os` leaves that to the system.
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
    """How an agent behaves; the rest it is told by the bus.

    hello_retry_ms: first pause before it says hello again (doubles, with jitter, up to 30 s).   observe_ms: how often
    the engine is looked at while nothing is asked of it.   reconcile_timeout_ms: deadline of calls that no command
    asked for. batch: decisions sent to the log at once.
    """

    hello_retry_ms: Positive = 200
    observe_ms: Positive = 1_000
    reconcile_timeout_ms: Positive = 600_000
    batch: Positive = 256
    durability: Literal["disk", "os"] = "os"
