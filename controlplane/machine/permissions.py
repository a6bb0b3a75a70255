"""What each key may do. Pure: `refusal` is asked about every message that arrives with a key.

A key has one role. An agent's key may be bound to places. What a peer may claim to be is decided by the key that it has
proven to hold, and by nothing that it says.
"""

from typing import Final, Literal

from msgspec import Struct

from schemas import wire
from schemas.agent_status import AgentStatus, RequestCounts

KeyRole = Literal["agent", "operator", "observer"]
"""`agent` joins the fleet, `operator` reads the status, publishes commands and syncs weights, `observer` only reads."""

PLACES_NAMED: Final = 8
"""Places of a key that a refusal names: it must fit into a message."""
MAY_SEND: Final[dict[KeyRole, tuple[type, ...]]] = {
    "agent": (
        *(wire.Hello, wire.Join, AgentStatus, wire.TimeRequest, RequestCounts),
        *(wire.CommandOutcome, wire.ResendRequest, wire.DecisionBatch, wire.Leave, wire.Goodbye, wire.PlaceRequest),
        wire.PeerRequest,
    ),
    "operator": (wire.StatusRequest, wire.Submit, wire.SyncRequest, wire.Retire),
    "observer": (wire.StatusRequest,),
}
"""Messages that each role may send. Every valid key may also subscribe."""


class Grant(Struct, frozen=True, kw_only=True):
    """What one key may do.

    Attributes:
        places: Of an agent's key: the agents it may be. `0.1` is one node, `0` every node of replica 0, `actor` every
            rank of that role. Empty for any.
    """

    name: str
    role: KeyRole
    places: tuple[str, ...] = ()


def refusal(grant: Grant, message: wire.Upward | wire.Operator, agent: str | None) -> str:
    """Return why a key may not send a message; empty if it may."""
    if not isinstance(message, MAY_SEND[grant.role]):
        return f"key {grant.name} is for {_WHO[grant.role]}, and may not {_WHAT.get(type(message), _WHAT_AGENTS_DO)}"
    anywhere = isinstance(message, wire.PlaceRequest)
    if grant.places and (anywhere or agent and not any(covers(place, agent) for place in grant.places)):
        named = ", ".join(grant.places[:PLACES_NAMED]) + (", …" if len(grant.places) > PLACES_NAMED else "")
        if anywhere:
            return f"key {grant.name} is for {named}: start its agent with that --replica"
        return f"key {grant.name} is for {named}, and may not be agent {agent}"
    return ""


def covers(place: str, agent: str) -> bool:
    """Whether an agent is at a place: it is the place, or below it."""
    return agent == place or agent.startswith(f"{place}.")


_WHO: Final[dict[KeyRole, str]] = {"agent": "agents", "operator": "operators", "observer": "observers"}
_WHAT: Final[dict[type, str]] = {
    wire.Submit: "publish commands",
    wire.SyncRequest: "sync weights",
    wire.Retire: "take places out of the run",
    wire.StatusRequest: "read the status",
}
_WHAT_AGENTS_DO: Final = "join the fleet"
