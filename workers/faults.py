"""Injects the faults of a plan into one agent, its engine and its connections: a game day on a staging fleet.

An agent has faults only if it was started with a plan. No message on the bus brings any, so no key can hurt a fleet
that was started without one. Each fault is in the agent's journal before it happens. The agent of a training rank lives
in the process that trains: that process is what is killed or stopped.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import anyio
from msgspec.structs import replace

from schemas.errors import ConfigError, RefusedError, UnansweredError
from schemas.events import Effect, EngineCall, Event, Observation, Returned
from schemas.fault_plan import OF_CALLS, OF_SERVERS, FaultPlan, Occasion, PlannedFault, is_due, occasions
from schemas.identity import Identity
from schemas.logs import logger_of
from schemas.wall_clock import wall_clock_ns
from workers.engine import Engine, EngineView
from workers.machine.state import AgentState, call_name

if TYPE_CHECKING:
    from workers.agent import Agent

logger = logger_of("faults")

LABEL: Final = "game day"
"""What an engine reports while its label is wrong on purpose."""


class FaultInjector:
    """The faults of one agent, for `Agent(faults=...)`.

    Args:
        plan: The game day.
        identity: The agent's place.
        server_pid: Returns the process of the engine's server, the leader of its session; None if the agent launches
            none.

    Raises:
        ConfigError: A fault needs a server that the agent launches.
    """

    def __init__(self, plan: FaultPlan, identity: Identity, server_pid: Callable[[], int | None] | None = None) -> None:
        self._plan, self._identity, self._faults = plan, identity, plan.of(identity)
        self._server_pid = server_pid
        for fault in self._faults:
            if fault.what in OF_SERVERS and server_pid is None:
                raise ConfigError(
                    f"fault {fault.name!r}: {fault.what} needs a server that this agent launches (--launch)"
                )
        self._agent: Agent | None = None
        self._due_calls: list[PlannedFault] = []  # of the call that is about to be made
        self._label_until_s = 0.0
        self._jumped_ns = 0
        self._relays: dict[tuple[str, str], _Relay] = {}  # by the bus's address, and by which connection it is

    def wrapped(self, engine: Engine | EngineView) -> Engine | EngineView:
        """Return an engine some of whose calls go wrong. One that is only observed makes none."""
        return _FaultyEngine(engine, self) if isinstance(engine, Engine) else engine

    def attach(self, agent: "Agent") -> None:
        """Watch an agent's decisions from now on."""
        self._agent = agent
        agent.decisions.add(self._heard)

    def wall_ns(self) -> int:
        """Return the node's wall clock, with its jumps."""
        return wall_clock_ns() + self._jumped_ns

    def dialled(self, address: str, connection: Literal["control", "commands"]) -> str:
        """Return where to dial for one of the bus's addresses: a relay, if a fault is about connections."""
        if all(fault.what not in ("cut", "hold") for fault in self._faults):
            return address
        if not address.startswith("tcp://"):
            raise ConfigError(f"the fault plan is about connections, and {address} is none over TCP")
        if (address, connection) not in self._relays:
            self._relays[address, connection] = _Relay(address)
        return self._relays[address, connection].address

    def close(self) -> None:
        for relay in self._relays.values():
            relay.close()

    # --- when ---------------------------------------------------------------------------------------------------------

    def _heard(self, event: Event, effects: Sequence[Effect]) -> None:
        assert self._agent is not None
        state = self._agent.state
        trigger = state.activity.trigger if state.activity is not None else None
        for occasion in occasions(event, effects, trigger.command if trigger is not None else None):
            self._meet(state, occasion)

    def _meet(self, state: AgentState, occasion: Occasion) -> None:
        if occasion.call:
            self._due_calls = []
        for fault in self._faults:
            due = not _is_spent(fault, state) and is_due(fault, occasion)
            if not due or not self._plan.happens(fault, self._identity, occasion):
                continue
            if fault.what in OF_CALLS:
                self._due_calls.append(fault)
            else:
                asyncio.get_running_loop().call_later(fault.after_s, self._happen, fault)

    def faults_of_call(self) -> list[PlannedFault]:
        due, self._due_calls = self._due_calls, []
        return due

    # --- what ---------------------------------------------------------------------------------------------------------

    def note(self, fault: PlannedFault) -> None:
        """Have the agent write a fault down."""
        assert self._agent is not None
        logger.warning("agent %s, fault %r on purpose: %s", self._identity.agent, fault.name, fault.what)
        self._agent.note_fault(fault.name, fault.what)

    def _happen(self, fault: PlannedFault) -> None:
        assert self._agent is not None
        if _is_spent(fault, self._agent.state):  # it was due again before it happened
            return
        if fault.what in OF_SERVERS and not self._signal_server(0):
            logger.warning("fault %r does not happen now: the engine's server is down already", fault.name)
            return
        self.note(fault)
        self._inject(fault)

    def _inject(self, fault: PlannedFault) -> None:
        match fault.what:
            case "kill_agent":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_engine":
                self._signal_server(signal.SIGKILL)
            case "kill_both":
                self._signal_server(signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop_agent":
                stop_this_process(fault.seconds)
            case "stop_engine":
                self._signal_server(signal.SIGSTOP)
                asyncio.get_running_loop().call_later(fault.seconds, self._signal_server, signal.SIGCONT)
            case "cut" | "hold":
                for (_, connection), relay in self._relays.items():
                    if fault.connection in ("both", connection):
                        relay.disturb(fault.what, fault.seconds)
            case "label":
                self._label_until_s = time.monotonic() + fault.seconds
            case "fill_disk":
                _fill_disk(True)
                asyncio.get_running_loop().call_later(fault.seconds, _fill_disk, False)
            case "jump_clock":
                self._jumped_ns += int(fault.seconds * 1e9)

    def _signal_server(self, number: int) -> bool:
        """Signal the server's session, and return whether there is one."""
        pid = self._server_pid() if self._server_pid is not None else None
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.killpg(pid, number)  # which it leads
                return True
        return False

    def seen(self, observation: Observation) -> Observation:
        """Return an observation as the agent is to have it."""
        return replace(observation, label=LABEL) if time.monotonic() < self._label_until_s else observation


class _FaultyEngine:
    """An engine some of whose calls go wrong."""

    def __init__(self, engine: Engine, injector: FaultInjector) -> None:
        self._engine, self._injector = engine, injector

    async def open(self) -> None:
        await self._engine.open()

    async def close(self) -> None:
        await self._engine.close()

    async def observe(self) -> Observation:
        return self._injector.seen(await self._engine.observe())

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        due = {fault.what: fault for fault in self._injector.faults_of_call()}
        for fault in due.values():
            self._injector.note(fault)
        if "refuse" in due:
            raise RefusedError(f"fault {due['refuse'].name!r} refuses {call_name(call)}.")
        returned = await self._engine.perform(call, timeout_s)
        if "slow" in due:
            await anyio.sleep(due["slow"].seconds)
        if "lose_answer" in due:
            raise UnansweredError(f"fault {due['lose_answer'].name!r} loses the answer of {call_name(call)}.")
        return returned


def _is_spent(fault: PlannedFault, state: AgentState) -> bool:
    return 0 < fault.times <= state.faults.get(fault.name, 0)


def stop_this_process(seconds: float) -> None:
    """Stop this process for so long. Another one continues it, and ends with it if it is killed meanwhile."""
    words = ["/bin/sh", "-c", f"timeout {seconds:g} cat || kill -CONT {os.getpid()}"]
    with subprocess.Popen(words, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waker:
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()  # with stdin open: its end means that this process is gone


def _fill_disk(full: bool) -> None:
    """Have every write of this process to a file fail, as on a full disk, or no longer. What is there stays."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else most, most))


class _Relay:
    """Passes bytes between an agent and one address of its bus, until it is told not to. In the agent's loop."""

    def __init__(self, target: str) -> None:
        place = urlsplit(target)
        self._target = place.hostname or "", place.port or 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._passes = asyncio.Event()
        self._passes.set()
        self._cut, self._until_s = False, 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving = asyncio.ensure_future(asyncio.start_server(self._connected, sock=self._listener))

    def close(self) -> None:
        if self._serving.done():
            self._serving.result().close()
        self._serving.cancel()
        self._listener.close()
        self._break_all()

    def _break_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def disturb(self, how: str, seconds: float) -> None:
        """Break all connections and admit none, or hold everything back, for some seconds."""
        self._passes.clear()
        if how == "cut":
            self._cut = True
            self._break_all()
        loop = asyncio.get_running_loop()
        self._until_s = max(self._until_s, loop.time() + seconds)
        loop.call_at(self._until_s, self._heal, self._until_s)

    def _heal(self, until_s: float) -> None:
        if until_s == self._until_s:  # none that lasts longer has begun
            self._cut = False
            self._passes.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            self._writers.add(target_writer)
            await asyncio.gather(self._pass_on(reader, target_writer), self._pass_on(target_reader, writer))
            self._writers.discard(target_writer)
        self._writers.discard(writer)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy one direction until it ends, or until it is cut. The other one ends with it."""
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
