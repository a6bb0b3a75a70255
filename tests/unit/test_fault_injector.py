"""Faults that an agent injects: how often, which connection they disturb, and what is left when the agent dies."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import closing, suppress
from typing import Any

import psutil
import pytest

from schemas.desired import Desired
from schemas.events import SnapshotReceived
from schemas.fault_plan import parse_plan
from schemas.identity import Identity
from schemas.listeners import Listeners
from tests.running import ROOT, python
from tests.source_files import imports, sources
from tests.waiting import wait_until
from workers.faults import FaultInjector
from workers.machine.state import AgentState, with_fault

HERE = Identity(replica=0, node_rank=0)
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close is a reset."""


def injector(text: str, server: int | None = None) -> FaultInjector:
    return FaultInjector(parse_plan(f"[[fault]]\nname='f'\n{text}"), HERE, lambda: server)


class AgentInPlace:
    """Stands for an agent: it counts its faults."""

    def __init__(self) -> None:
        self.state = AgentState()
        self.decisions: Listeners[Any] = Listeners()

    def note_fault(self, name: str, what: str) -> None:
        self.state = with_fault(self.state, name)

    def join(self) -> None:
        self.decisions.notify(SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired()), ())


def test_only_the_start_of_an_agent_or_of_a_training_rank_brings_faults_and_no_message_does() -> None:
    makers = {str(file.path) for file in sources("schemas", "controlplane", "workers") if "FaultInjector(" in file.text}
    assert makers == {"controlplane/cli/agent.py", "workers/profilers/rank.py"}
    known = [file.module for file in sources("schemas") for found in imports(file) if "fault_plan" in found.module]
    assert known == [], "nothing that is decoded from a message knows plans"


def test_a_fault_that_is_due_again_before_it_happened_happens_no_more_often_than_its_limit() -> None:
    async def jumped_s() -> float:
        agent, faults, later = (
            AgentInPlace(),
            injector("what='jump_clock'\nseconds=3600\nafter_s=0.01"),
            asyncio.Event(),
        )
        faults.attach(agent)  # type: ignore[arg-type]
        before_ns = faults.wall_ns()
        agent.join()
        agent.join()
        asyncio.get_running_loop().call_later(0.01, later.set)  # after both
        await later.wait()
        assert agent.state.faults == {"f": 1}
        return (faults.wall_ns() - before_ns) / 1e9

    assert 3600 <= asyncio.run(jumped_s()) < 7200


def test_an_engine_whose_server_is_down_is_not_killed_and_one_that_runs_is() -> None:
    pids: list[int | None] = [None]
    plan = parse_plan("[[fault]]\nname='f'\nwhat='kill_engine'")

    async def joins() -> dict[str, int]:
        agent, faults, later = AgentInPlace(), FaultInjector(plan, HERE, lambda: pids[-1]), asyncio.Event()
        faults.attach(agent)  # type: ignore[arg-type]
        agent.join()
        asyncio.get_running_loop().call_later(0, later.set)
        await later.wait()
        return dict(agent.state.faults)

    assert asyncio.run(joins()) == {}
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as server:
        pids.append(server.pid)
        assert asyncio.run(joins()) == {"f": 1}
        assert server.wait(30) == -signal.SIGKILL
    assert asyncio.run(joins()) == {}


def test_an_engine_that_is_stopped_goes_on_after_its_time() -> None:
    async def stops(pid: int) -> None:
        agent, faults = AgentInPlace(), injector("what='stop_engine'\nseconds=0.05", pid)
        faults.attach(agent)  # type: ignore[arg-type]
        agent.join()
        _, status = await asyncio.to_thread(os.waitpid, pid, os.WCONTINUED)
        assert os.WIFCONTINUED(status), "only what was stopped is continued"

    with subprocess.Popen(["sleep", "600"], start_new_session=True) as server:
        asyncio.run(stops(server.pid))
        server.kill()


KILLS = """
import asyncio, sys
from tests.unit.test_fault_injector import AgentInPlace, injector
async def main():
    agent, faults = AgentInPlace(), injector("what='kill_both'", int(sys.argv[1]))
    faults.attach(agent)
    agent.join()
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_engine_and_agent_are_killed_together() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as server:
        assert python("-c", KILLS, server.pid).returncode == server.wait(30) == -signal.SIGKILL


class Far:
    """Listens where a bus would."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()

    def accept(self) -> socket.socket:
        self._socket.settimeout(30)
        return self._socket.accept()[0]


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.removeprefix("tcp://").partition(":")
    return await asyncio.open_connection(host, int(port))


def test_a_connection_that_the_bus_resets_ends_on_the_agents_side_too() -> None:
    async def main() -> None:
        wrong: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        with closing(Far()) as far, closing(injector("what='cut'\nseconds=1")) as faults:
            reader, writer = await dial(faults.dialled(far.address, "control"))
            bus = await asyncio.to_thread(far.accept)
            bus.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            bus.close()
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
        assert not wrong

    asyncio.run(main())


def test_a_fault_of_one_connection_disturbs_that_one_also_after_the_bus_has_moved() -> None:
    async def main() -> None:
        agent, faults = AgentInPlace(), injector("what='cut'\nseconds=3600\nconnection='control'")
        faults.attach(agent)  # type: ignore[arg-type]
        with closing(faults), closing(Far()) as old, closing(Far()) as control, closing(Far()) as commands:
            faults.dialled(old.address, "control")
            cut, cut_writer = await dial(faults.dialled(control.address, "control"))
            kept, kept_writer = await dial(faults.dialled(commands.address, "commands"))
            with await asyncio.to_thread(control.accept), await asyncio.to_thread(commands.accept) as bus:
                agent.join()
                with suppress(ConnectionResetError):
                    assert await asyncio.wait_for(cut.read(), 30) == b""
                bus.sendall(b"published")
                assert await asyncio.wait_for(kept.readexactly(9), 30) == b"published"
            cut_writer.close()
            kept_writer.close()

    asyncio.run(main())


def test_a_disturbance_lasts_as_long_as_the_longest_of_those_that_overlap() -> None:
    async def main() -> None:
        agent = AgentInPlace()
        plan = "".join(f"[[fault]]\nname='{s}'\nwhat='hold'\nseconds={s}\n" for s in (3600.0, 0.01))
        faults = FaultInjector(parse_plan(plan), HERE)
        faults.attach(agent)  # type: ignore[arg-type]
        with closing(faults), closing(Far()) as far:
            reader, writer = await dial(faults.dialled(far.address, "control"))
            with await asyncio.to_thread(far.accept) as bus:
                agent.join()
                bus.sendall(b"held")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.3)
            writer.close()

    asyncio.run(main())


def test_an_agent_that_is_killed_while_it_is_stopped_leaves_nothing_behind() -> None:
    words = [sys.executable, "-c", "from workers.faults import stop_this_process; stop_this_process(3600)"]
    with subprocess.Popen(words, cwd=ROOT) as stopped:
        process = psutil.Process(stopped.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        left = process.children(recursive=True)
        stopped.kill()
        stopped.wait()
    assert psutil.wait_procs(left, timeout=30)[1] == []


def test_a_stop_ends_by_itself_and_leaves_nothing_behind() -> None:
    text = "import psutil; from workers.faults import stop_this_process; stop_this_process(0.2)"
    text += "; assert not psutil.Process().children(recursive=True)"
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, timeout=60)
