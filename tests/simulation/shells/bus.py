"""One life of the real bus: `controlplane.bus.Bus`, with its loop, inbox, callers and the run's log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
from anyio import CancelScope

from controlplane.bus.bus import Bus
from controlplane.machine import events
from controlplane.machine.coordinator import CoordinatorState, decide
from controlplane.record.log import RunLog
from controlplane.tickets import Ticket
from schemas.agent_status import AgentStatus
from schemas.config import BusConfig
from schemas.errors import BusError, CommandError
from schemas.wire import decode_command, encode
from tests.simulation.bus import Bus as Life
from tests.simulation.promises import Broken
from tests.simulation.shells.agents import ADDRESS
from tests.simulation.shells.network import Host
from tests.simulation.trainer import Trainer

if TYPE_CHECKING:
    from tests.simulation.shells.world import ShellWorld

TICKET_LATE_MS = 100
"""How much later than its deadline a ticket may end: each phase waits for its turn."""
WATCH_MS = 100


class RealBus:
    """One life of the bus.

    Attributes:
        dead: It was killed.
        state: What the coordinator knows, as of the last decision that was judged.
        tickets: Orders that it was handed.
    """

    def __init__(self, world: ShellWorld, life: int) -> None:
        self.world, self.life = world, life
        self.dead = self._entered = self._over = False
        self.tickets = self.opened_at = 0
        self.committing: object = None
        self.queue: tuple[()] = ()
        self.told: dict[str, AgentStatus] = {}
        self.slowest_ms = 0
        self.state = CoordinatorState()
        self._real: Bus | None = None
        self._open: list[Ticket[Any]] = []
        self._ending = anyio.Event()
        self._scope: CancelScope | None = None
        self.over = anyio.Event()

    @property
    def alive(self) -> bool:
        """Whether it is open, and was neither killed nor asked to close."""
        return self._entered and not self._over

    @property
    def now_us(self) -> int:
        """The moment on its clock."""
        return self._real.now_us() if self._real is not None else 0

    @property
    def late_us(self) -> int:
        """How late a timer may be: it is rounded up, and waits for the turns before it."""
        return 2000

    # --- life ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open it, once the one before it has closed."""
        self.world.spawn(self._live())

    async def _live(self) -> None:
        try:
            for earlier in self.world.buses[: self.life - 1]:
                await cast("RealBus", earlier).over.wait()
            if not self._over:
                await self._serve()
        finally:
            self.over.set()

    async def _serve(self) -> None:
        world, error = self.world, None
        log = RunLog.open(world.log_path, "run", "disk" if world.disk else "os")
        self.state = log.state
        self._judge_log(world.log_path)
        world.say(f"bus {self.life} opens at seq {self.state.seq}")
        host, port = Host(world.network), 5556 if world.one_port else None
        config = BusConfig(
            **{name: getattr(world.settings, name) for name in COORDINATOR},
            head_interval_ms=1000,
            publish_port=port,
            durability="disk" if world.disk else "os",
        )
        bus = Bus(ADDRESS, log, config, context=cast(Any, host))
        bus.decisions.add(self._decided)
        self._real, self._host = bus, host
        with CancelScope() as self._scope:
            try:
                async with bus:
                    self._entered = True
                    self.opened_at = len(world.log.records)
                    world.at(WATCH_MS, self._watch)
                    await self._ending.wait()
            except (Exception, asyncio.CancelledError) as raised:
                error = raised
        if not self.dead and (left := [ticket for ticket in self._open if not ticket.done]):
            world.fail(Broken("P3 answer", f"bus {self.life} has closed, and {left} have not ended"))
        if not self.dead and (error is not None or bus.fault is not None):
            world.fail(Broken("S1 no silent end", f"bus {self.life} ended: {error!r}, {bus.fault!r}"))

    def _watch(self) -> None:
        """Do what a thread of the trainer does beside the loop."""
        if self._real is not None and not (self.over.is_set() or self.dead):
            self._real.watch()
            self._judge_tickets(self._real)
            if self._real.fault is not None:
                self.world.fail(Broken("S1 no silent end", f"bus {self.life} has stopped: {self._real.fault}"))
            self.world.at(WATCH_MS, self._watch)

    def die(self) -> None:
        """The trainer is killed."""
        if not self._over:
            self.world.say(f"bus {self.life} is killed")
            self.dead = self._over = True
            self.world.survive()
            self.world.inside(self._kill)

    def _kill(self) -> None:
        if self._real is not None:
            self._host.die()
        if self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        """An orderly end."""
        if not self._over:
            self.world.say(f"bus {self.life} closes")
            self._over = True
            self.world.inside(self._ending.set)

    # --- orders -------------------------------------------------------------------------------------------------------

    def order(self, order: events.CallerEvent) -> None:
        """Hand over what the trainer wants."""
        bus, ticket = self._real, None
        if bus is None or not bus.is_up or self.dead:
            return
        try:
            ticket = _hand_over(bus, order)
        except (CommandError, BusError) as error:
            self.world.say(f"bus {self.life} refuses {order!r:.200}: {error}")
        if ticket is not None:
            self._open.append(ticket)

    def _judge_tickets(self, bus: Bus) -> None:
        """P3: each ticket ends by its deadline."""
        self._open = [ticket for ticket in self._open if not ticket.done]
        for ticket in self._open:
            if bus.now_us() > ticket.deadline_us + 1000 * TICKET_LATE_MS:
                self.world.fail(Broken("P3 answer", f"ticket {ticket.number} of bus {self.life} outlives its deadline"))

    # --- judges -------------------------------------------------------------------------------------------------------

    def _judge_log(self, path: Path) -> None:
        """P9: what agents and callers were told is in the log, whenever its process was killed."""
        records = self.world.read_log(path)
        self.world.promises.kept(records)
        self.world.log.records[:] = records

    def _decided(self, event: events.CoordinatorEvent, effects: events.CoordinatorEffects) -> None:
        if not self.dead:
            self.world.guarded(self._judge, event, tuple(effects))

    def _judge(self, event: events.CoordinatorEvent, effects: tuple[events.CoordinatorEffect, ...]) -> None:
        world, life = self.world, cast("Life", self)
        if world.story is not None:
            world.say(f"    bus {self.life} {event!r:.300}\n            -> {list(effects)!r:.600}")
        before = self.state
        self.state, again = decide(before, event)
        if encode(again) != encode(effects):
            world.promises.broken("P9 recorded", f"the bus decided differently: {event}")
        world.log.records.append((encode(event), encode(effects)))
        world.promises.after_bus(life, before, event, effects)
        for effect in effects:
            world.promises.told(effect)
            if isinstance(effect, events.Publish):
                world.trainer.on_published(life, effect)
                world.on_published(life, decode_command(effect.envelope.body))


COORDINATOR = ("heartbeat_ms", "agent_timeout_ms", "lease_ms", "history", "retransmit_ms", "after_send_ms")
"""Settings of the coordinator that are the bus's."""


class RealTrainer(Trainer):
    """The trainer, which hands its orders to a real bus."""

    def hand_over(self, bus: Life, order: events.CallerEvent) -> None:
        """Hand an order to the bus."""
        cast("RealBus", bus).order(order)


def _hand_over(bus: Bus, order: events.CallerEvent) -> Ticket[Any] | None:
    match order:
        case events.Issued():
            return bus.publish(order.command, order.target, order.timeout_ms)
        case events.SyncRequested():
            return bus.sync(order)
        case events.RetireRequested():
            return bus.retire(order.places)
        case events.SendFailed():
            bus.note_sent(Ticket(order.ticket), order.reason)
        case events.SendReturned():
            bus.note_sent(Ticket(order.ticket))
    return None
