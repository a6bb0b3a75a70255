"""The real agent of one simulated place: `workers.agent.Agent`, with link, connection, driver and journal.

Simulated is what it touches: its engine, through a backend; its sockets; its clock; and the end of its process, after
which its journal is what was committed, and nothing that is left of it counts.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
from anyio import CancelScope

from schemas import events
from schemas.config import AgentConfig
from schemas.errors import AgentError, CheckpointError, EngineError, IdentityTaken, RefusedError, UnansweredError
from schemas.outcomes import Trace
from tests.simulation import verdicts
from tests.simulation.agent import NO_TOKENIZER, Process
from tests.simulation.engine import LOST, Attempt
from tests.simulation.promises import Broken
from tests.simulation.shells.network import Host, Way
from tests.simulation.slot import Disk, Slot
from workers.agent import Agent
from workers.machine.rules import is_leaving
from workers.machine.state import AgentState
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from tests.simulation.shells.bus import RealBus
    from tests.simulation.shells.world import ShellWorld

ADDRESS: Final = "tcp://127.0.0.1:5555"
CUT_OFF_MS: Final = 1e9
OBSERVE_MS: Final = (0, 0, 0, 1, 20)
"""How long an observation may take in calm weather."""
WAITS_MS: Final = 100
"""How long a call may wait for an observation to give way."""
SLOW_MS: Final = (300, 2000, 16_000, 40_000)
"""And in bad weather; the longest are longer than the driver waits."""


_KILLED: Final = events.Fault("engine_error", "the process was killed")


class Folder(Disk):
    """The folder of an agent's journal."""

    def __init__(self, root: Path) -> None:
        super().__init__("")
        self.root, self.lives = root, 0
        self.path = root / "0"

    def erase(self) -> None:
        """Lose it."""
        self.lives += 1
        self.path = self.root / str(self.lives)

    def survive(self) -> None:
        """Keep what the process that was killed had written, where what is left of it can't reach it."""
        before = self.path
        self.erase()
        if before.exists():
            shutil.copytree(before, self.path)


class RealSlot(Slot):
    """A place whose agents are real."""

    world: ShellWorld
    disk: Folder

    def new_disk(self, seed: str) -> Folder:
        """Return an empty folder."""
        return Folder(self.world.folder / seed)

    def new_process(self) -> Process:
        """Return its next agent."""
        return cast("Process", RealProcess(self))


class RealProcess:
    """One process of an agent: it begins with `begin`, and ends by itself, by `leave` or by `die`.

    Attributes:
        alive: It has not been killed, and not ended.
        state: What its machine knows, as of the last decision that was judged.
        trigger: The command for which its last call was asked. It may be superseded before the call begins.
    """

    def __init__(self, slot: RealSlot) -> None:
        self.slot, self.world = slot, slot.world
        self.alive, self.dead, self._leaving = True, False, False
        self.state = AgentState()
        self.trigger: events.CommandReceived | None = None
        self.incarnation = ""
        self.host = Host(self.world.network, self._blocked_ms)
        self.calls_alone: list[int] = []
        self.new_key, self.sub = False, None
        self.commanded_ms = self.world.now
        self._expired_ms = -1  # when its lease last expired
        self.waiting: deque[object] = deque()
        self.driver_killed, self.held_ms = False, 0
        self.requested_ms = 0  # when its machine last asked for a call
        self._restart_asked = False
        self._scope: CancelScope | None = None
        self.backend = Backend(self)

    @property
    def peer(self) -> str:
        """Its connection, as the bus knows it."""
        member = self.world.bus.state.members.get(self.slot.name) if self.world.bus is not None else None
        known = member is not None and member.hello.incarnation == self.incarnation
        return member.peer if known and member is not None else f"{self.slot.name}/{self.incarnation}/none"

    @property
    def published_ms(self) -> int:
        """When it last got a publication."""
        return self.world.moment_ms(self.host.published_s)

    heard_ms = published_ms
    """When its lease was last renewed, about: heads do that."""

    @property
    def bus(self) -> RealBus | None:
        """The bus that is there."""
        bus = cast("RealBus | None", self.world.bus)
        return bus if bus is not None and bus.alive else None

    @property
    def lease_over(self) -> bool:
        """Whether it goes on without a bus: its lease has expired, and it has got no publication since."""
        return self._expired_ms >= self.published_ms

    def _blocked_ms(self, way: Way) -> float:
        return CUT_OFF_MS if self.slot.cut_off else max(0, self.slot.blocked_until[way] - self.world.now)

    # --- life ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the process."""
        self.agent = Agent(
            bus=ADDRESS,
            identity=self.slot.identity,
            engine=self.backend,
            state_dir=self.slot.disk.path,
            traces=cast("NodeTraces", Traces(self)),
            config=AgentConfig(
                reconcile_timeout_ms=5000,
                on_lost_bus=self.slot.on_lost_bus,
                memory=self.slot.engine.memory if self.slot.engine is not None else "agent",
                rejoin=self.slot.rejoins,
            ),
            context=cast(Any, self.host),
        )
        self.agent.decisions.add(self._decided)
        self.world.say(f"{self.slot.name} starts")
        self.world.spawn(self._live())

    async def _live(self) -> None:
        error: BaseException | None = None
        if self.dead:  # already
            return
        with CancelScope() as self._scope:
            try:
                async with self.agent:
                    await self.agent.run()
            except (Exception, asyncio.CancelledError) as raised:
                error = raised
        if not self.dead:
            self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        self.world.say(f"{self.peer} ends: {error!r}")
        if isinstance(error, IdentityTaken):
            self._gone()
            self.slot.turn_away(self.peer)
        elif self._may_end(error):
            self._gone()
            self.world.at(self.world.rng.choice((10, 500, 3000)), self.slot.start)
        else:
            self.world.fail(Broken("S1 no silent end", f"{self.peer} ended without having been asked: {error!r}"))

    def _may_end(self, error: BaseException | None) -> bool:
        """Whether it was asked to end, or its backend has cancelled it, of which it says so."""
        asked = self._leaving and isinstance(error, asyncio.CancelledError | None)
        drained = error is None and is_leaving(self.state)
        return asked or drained or (self.driver_killed and isinstance(error, AgentError))

    def die(self) -> None:
        """Be killed: what is not in the journal is lost. The engine may or may not finish its call."""
        if self.alive:
            self.world.say(f"{self.peer} dies")
            self.stop()
            self.world.at(self.world.rng.choice((10, 500, 3000)), self.slot.start)

    def stop(self) -> None:
        """Be killed, for good."""
        self.slot.disk.survive()
        self.world.inside(self._kill)

    def _kill(self) -> None:
        self._gone()
        self.host.die()
        if self._scope is not None:
            self._scope.cancel()

    def leave(self) -> None:
        """An orderly end: the call in flight is awaited, and no other is begun."""
        if self.alive and not self._leaving and self._scope is not None:
            self.world.say(f"{self.peer} leaves")
            self._leaving = True
            self.world.inside(self._scope.cancel)

    def ask_to_leave(self, grace_ms: int) -> None:
        """Be asked to end in good order, and end without that if it takes too long."""
        if self.alive and self._scope is not None and self.state.joined:
            self.world.spawn(self._drain(grace_ms))

    async def _drain(self, grace_ms: int) -> None:
        await self.agent.drain(grace_ms / 1000)
        self.leave()

    def _gone(self) -> None:
        self.alive, self.dead = False, True
        engine = self.slot.engine
        if engine is not None and engine.caller is cast("Process", self):
            engine.cut()
        self.backend.die()
        if self.slot.process is cast("Process", self):
            self.slot.process = None

    # --- the network --------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Break its connections."""
        for conn in self.host.conns():
            conn.cut()

    def fall_silent(self, connections: tuple[str, ...]) -> None:
        """Half-open connections: from now on they carry nothing, and neither side is told."""
        self.world.say(f"{self.peer}: nothing passes on {', '.join(connections)} any more")
        for conn in self.host.conns():
            conn.silent = conn.silent or ("pub" if conn.publishes else "control") in connections

    # --- judges -------------------------------------------------------------------------------------------------------

    def _decided(self, event: events.Event, effects: Any) -> None:
        if not self.dead:
            self.world.guarded(self._judge, event, tuple(effects))

    def _judge(self, event: events.Event, effects: tuple[events.Effect, ...]) -> None:
        before, self.state = self.state, self.agent.state
        if self.world.story is not None:
            self.world.say(f"    {self.peer} {event}\n            -> {list(effects)}")
        if isinstance(event, events.Started):
            self._judge_start(event)
        if isinstance(event, events.LeaseExpired):
            self._expired_ms = self.world.now
        self.world.promises.after_agent(cast("Process", self), before, event, effects)
        self._restart_asked = self._restart_asked or any(isinstance(effect, events.Restart) for effect in effects)
        for effect in effects:
            if isinstance(effect, events.Perform):
                self.requested_ms = self.world.now
                self.trigger = self.state.activity.trigger if self.state.activity is not None else None
            if isinstance(effect, events.Perform) and isinstance(
                effect.call, events.AwaitPush | events.AwaitIdle | events.Observe
            ):
                self.world.promises.performing(cast("Process", self), effect)

    def returned(self, attempt: Attempt) -> None:
        """Tell its backend that a call has got what it waits for."""
        self.backend.returned(attempt)

    def judge_lease(self) -> None:
        """P7: the end of its lease, unless it has not joined yet, or waits for its engine to end."""
        self.commanded_ms = max(self.commanded_ms, self.published_ms)
        if not self.state.joined or self.state.stopping:
            self.commanded_ms = self.world.now
        self.world.promises.judge("P7 trainer first", verdicts.leased(cast("Process", self)))

    def _judge_start(self, started: events.Started) -> None:
        if self.incarnation and not self._restart_asked:
            self.world.promises.broken("S1 no silent end", f"{self.peer} begins anew, and nothing has asked for that")
        self.incarnation, self._restart_asked = started.incarnation, False


class Backend:
    """The backend of a simulated engine. In bad weather it does what backends should not, and some do."""

    def __init__(self, process: RealProcess) -> None:
        self.process, self.world = process, process.world
        self.luck = Random(f"backend {self.slot.name} {self.slot.double} {self.slot.incarnations} {self.world.seed}")
        self._calling = False
        self._stubborn_ms = 0  # when an observation that could not be cancelled has ended
        self._died = False
        self._attempt: Attempt | None = None
        self._woken = anyio.Event()

    @property
    def slot(self) -> RealSlot:
        """The place of its agent, which gives it up when it is cut off for good, and goes on in another one."""
        return self.process.slot

    def die(self) -> None:
        """End with the process."""
        self._died = True
        self._woken.set()

    def returned(self, attempt: Attempt) -> None:
        """End a call sooner than it would by itself: it has got what it waits for."""
        if attempt is self._attempt:
            self._woken.set()

    async def open(self) -> None:
        """Attach to the engine."""

    async def close(self) -> None:
        """Detach from it."""

    async def observe(self) -> events.Observation:
        """Return what the engine shows; late, never, or not at all, as the weather is."""
        self._enter("observes")
        try:
            await self._observe_late()
            process, engine = self.process, self.slot.engine
            if engine is None or process.dead:
                return NO_TOKENIZER
            seen = engine.observe()
            engine.shown(seen, self.slot.double)
            return seen
        finally:
            self._calling = False

    async def _observe_late(self) -> None:
        rough, luck = self.world.rough, self.luck
        if luck.random() < rough.slow:
            stubborn = luck.random() < rough.stubborn
            with CancelScope(shield=stubborn):
                await self._pass(luck.choice(SLOW_MS))
            self._stubborn_ms = self.world.now if stubborn else self._stubborn_ms
            if stubborn and rough.stray and luck.random() < 0.5:
                raise asyncio.CancelledError
        await self._pass(luck.choice(OBSERVE_MS))
        if luck.random() < rough.stray:
            self._misbehave()

    async def perform(self, call: events.EngineCall | events.DiskCall, timeout_s: float) -> events.Returned:
        """Make a call."""
        self._enter(f"calls {call}")
        try:
            result = await self._perform(call, timeout_s)
        except asyncio.CancelledError:
            if not (self.process.dead or self.process.driver_killed or is_leaving(self.process.agent.state)):
                self.world.fail(Broken("S4 no call is cancelled", f"{self.process.peer}: {call}"))
            raise
        except Exception as error:
            self.world.fail(error)
            raise
        finally:
            self._calling = False
        if isinstance(result, events.Fault):
            raise self._error_of(result)
        return result

    async def _perform(self, call: events.Call, timeout_s: float) -> events.Returned | events.Fault:
        process, engine, world = self.process, self.slot.engine, self.world
        activity = process.agent.state.activity
        if process.dead or activity is None:
            return _KILLED
        if engine is None:
            world.promises.broken("P5 one effect", f"{process.peer} has no engine and calls it")
        if activity.trigger is not None and timeout_s <= 0:
            world.promises.broken("S2 no late call", f"{process.peer} begins {call} after its deadline")
        if world.now > max(process.requested_ms, self._stubborn_ms) + WAITS_MS:
            world.promises.broken("S5 commands first", f"{process.peer} was asked at {process.requested_ms} ms: {call}")
        perform = events.Perform(call_id=activity.call_id, call=call)
        self._attempt, duration_ms = attempt, _ = self.slot.begin_call(cast("Process", process), perform, engine)
        await self._pass(duration_ms)
        self._attempt = None
        return _KILLED if process.dead else self._end(attempt)

    def _end(self, attempt: Attempt) -> events.Returned | events.Fault:
        engine = self.slot.engine
        assert engine is not None
        result = engine.end(attempt)
        self.world.called(self.slot)
        if self.luck.random() < self.world.rough.murder:
            self.process.driver_killed = True
            engine.doubt(attempt.call)
            task = asyncio.current_task()
            assert task is not None
            task.cancel("by the backend")
        return result

    def _error_of(self, fault: events.Fault) -> BaseException:
        match fault.kind:
            case "source_refused":
                return CheckpointError(fault.message)
            case "refused":
                return RefusedError(fault.message)
            case _ if fault.kind == LOST:
                stray = self.world.rough.stray > 0 and self.luck.random() < 0.5
                return asyncio.CancelledError() if stray else UnansweredError(fault.message)
        return self.luck.choice((EngineError, ValueError))(fault.message)

    def _misbehave(self) -> None:
        """Raise what no backend should."""
        raise self.luck.choice((asyncio.CancelledError, ValueError, EngineError))("stray")

    def _enter(self, what: str) -> None:
        if self._calling and not self.process.dead:
            self.world.fail(Broken("P5 one effect", f"{self.process.peer} {what} during another call or observation"))
        self._calling = True

    async def _pass(self, delay_ms: float) -> None:
        """Let time pass, unless the process is killed."""
        if delay_ms and not self._died:
            self._woken = anyio.Event()
            with anyio.move_on_after(delay_ms / 1000):
                await self._woken.wait()


class Traces:
    """The traces on the disk of a node, which are those of its engine."""

    def __init__(self, process: RealProcess) -> None:
        self.process = process

    async def perform(self, call: events.DiskCall) -> events.Returned:
        """Collect them, or finish."""
        backend = self.process.backend
        if backend.slot.engine is not None:
            return await backend.perform(call, 1.0)
        await backend._pass(backend.luck.choice((1, 50, 3000)))
        return events.Returned(traces=(Trace("global_step_1/replica_0/rank1.json", 1, "sha256"),))
