"""A command on its way: it gets a seq, changes what is desired, and is sent again to agents that miss it. Pure."""

from collections.abc import Mapping
from heapq import nsmallest
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.adapters import with_wanted
from controlplane.machine.coordinator_state import CoordinatorState, Effects, OpenCommand, Order, send
from controlplane.machine.replicas import away_ms, identities, live_agents
from controlplane.machine.stops import stops_after
from schemas.commands import Command, Target
from schemas.desired import Desired, changes_nothing, desired_after
from schemas.identity import Identity, identity_of
from schemas.outcomes import Missing
from schemas.reports import AgentOutcome
from schemas.wire import MAX_COMMAND_BYTES, MAX_TARGET_BYTES, CommandRecord, Envelope, Replay, encode

PAGE: Final = 64
"""Records in one page of replay, and agents that one event retransmits to, at most."""
PAGE_BYTES: Final = 192 * 1024
"""Bytes of commands in one page, at most."""
UNSEEN: Final = Identity(replica=2**31 - 1, node_rank=0)
"""Stands for every replica that has not been seen yet: no quarantine and no set of ranks names it."""


def oversize(command: Command, target: Target) -> str:
    """Return why the record of a command is too large for a message; empty if it is not. Asked before it has a seq."""
    sizes = {"command": (len(encode(command)), MAX_COMMAND_BYTES), "target": (len(encode(target)), MAX_TARGET_BYTES)}
    problems = [
        f"the {part} takes {size:,} bytes, of at most {most:,}" for part, (size, most) in sizes.items() if size > most
    ]
    advice = "Name fewer replicas or ranks, or all of them by naming none"
    return f"{' and '.join(problems)}; nothing was published. {advice}" if problems else ""


def publish(
    state: CoordinatorState,
    command: Command,
    target: Target,
    timeout_ms: int,
    event: events.CoordinatorEvent,
    effects: Effects,
    *,
    ticket: int | None = None,
    operator: bool = False,
) -> CoordinatorState:
    """Give the command the next seq, fold it into the desired state, and open it for every live agent.

    Agents get a little less time than the trainer waits, so that "no time left" arrives as an answer.
    """
    seq = state.seq + 1
    ttl_ms = timeout_ms - min(1000, timeout_ms // 10)
    envelope = Envelope(
        run=state.run, issued_at_ns=event.at_ns, ttl_ms=ttl_ms, body=Raw(encode(command)), target=target
    )
    record = CommandRecord(origin=state.epoch, seq=seq, envelope=envelope)
    open_command = OpenCommand(
        record=record,
        command=command,
        ticket=ticket,
        issued_us=event.at_us,
        deadline_us=event.at_us + timeout_ms * 1000,
        retransmit_us=event.at_us + state.settings.retransmit_ms * 1000,
        expected=live_agents(state),
        absent=_absent_outcomes(state, event.at_us),
    )
    history = (*state.history, (record, event.at_us + ttl_ms * 1000))
    effects.append(events.Publish(epoch=state.epoch, seq=seq, envelope=envelope))
    desired, default_desired = _desired_after(state, command, target)
    after = replace(
        state,
        seq=seq,
        open=(*state.open, open_command),
        history=history[-state.settings.history :],
        desired=desired,
        default_desired=default_desired,
        stops=stops_after(state.stops, command, desired, default_desired, Order(operator, event.at_ns)),
    )
    return with_wanted(after, state, command)


def _absent_outcomes(state: CoordinatorState, at_us: int) -> tuple[AgentOutcome, ...]:
    """What a command that is issued now concludes for each known agent that is not live."""
    draining = state.draining
    return tuple(
        AgentOutcome(agent=name, conclusion=Missing("absent", away_ms(member, at_us)))
        for name, member in sorted(state.members.items())
        if member.joined and member.state != "live" and member.hello.identity.unit not in draining
    )


def _desired_after(
    state: CoordinatorState, command: Command, target: Target
) -> tuple[Mapping[int | str, Desired], Desired]:
    """What is desired of each unit, and of a replica that has not been seen yet, after a command."""
    if changes_nothing(command):
        return state.desired, state.default_desired
    known = identities(state)
    desired = {
        unit: desired_after(before, command, target.includes(identity), identity)
        for unit, before in state.desired.items()
        # Stands for a unit that left in an earlier life of the bus, until it comes back.
        for absent in (identity_of(unit) if isinstance(unit, str) else Identity(replica=unit, node_rank=0),)
        for identity in (known.get(unit) or absent,)
    }
    return desired, desired_after(state.default_desired, command, target.replicas is None, UNSEEN)


# --- again ------------------------------------------------------------------------------------------------------------


def retransmit(state: CoordinatorState, command: OpenCommand, at_us: int, effects: Effects) -> OpenCommand:
    """Send the command again to agents that have not answered, a page of them in one turn, so that a large fleet holds
    up no agent. Once all have had their turn, the next round follows after twice the time.
    """
    record = _with_time_left(command.record, command.issued_us + command.record.envelope.ttl_ms * 1000, at_us)
    names = nsmallest(PAGE, (name for name in command.waiting if name > command.resent_through))
    for name in names:
        send(state, state.members[name].peer, Replay(records=(record,)), effects)
    if len(names) == PAGE:
        return replace(command, resent_through=names[-1], retransmit_us=at_us + 1000)
    next_us = command.issued_us + (at_us - command.issued_us) * 2
    return replace(command, resent_through="", retransmit_us=next_us)


def send_missing(state: CoordinatorState, event: events.ResendRequested, effects: Effects) -> None:
    """Send a page of the records that an agent misses; the history has the first of them."""
    page: list[CommandRecord] = []
    size = 0
    start = event.first - state.history[0][0].seq
    for record, expires_us in state.history[start : start + min(event.credit, PAGE)]:
        size += len(encode(record))
        if page and size > PAGE_BYTES:
            break
        page.append(_with_time_left(record, expires_us, event.at_us))
    if page:
        send(state, event.peer, Replay(records=tuple(page)), effects)


def _with_time_left(record: CommandRecord, expires_us: int, at_us: int) -> CommandRecord:
    return replace(record, envelope=replace(record.envelope, ttl_ms=max(0, expires_us - at_us) // 1000))
