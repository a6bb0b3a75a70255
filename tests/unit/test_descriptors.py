"""File descriptors of the trainer's process: raised when a bus opens, and said when few are left."""

import logging
import resource
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
import zmq

from controlplane import ControlPlane
from controlplane.bus.descriptors import CHECK_US, PER_AGENT, Descriptors, raise_limit
from schemas.config import BusConfig
from schemas.transport.sockets import Context, agent_dealer, bus_publisher, bus_router
from tests.running import python

ADDRESS = "tcp://127.0.0.1:0"

OPEN_A_BUS = """
import resource, sys
from controlplane import ControlPlane
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
with ControlPlane("tcp://127.0.0.1:0", log=sys.argv[1]) as plane:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "enough"), [(256, 19_000, True), (256, 2_000, False), (18_500, 19_000, True)])
def test_a_bus_raises_the_soft_limit_for_all_its_agents_as_far_as_it_may(
    tmp_path: Path, soft: int, hard: int, enough: bool
) -> None:
    done = python("-c", OPEN_A_BUS, tmp_path / "run.db", soft, hard)
    assert done.returncode == 0, done.stderr
    raised, kept = map(int, done.stdout.split())
    assert kept == hard and soft <= raised <= hard
    assert raised > BusConfig().agents_max * PER_AGENT if enough else raised == hard


def test_a_limit_that_is_high_enough_is_left_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes the process one with a limit and a number of open descriptors."""

    def set_to(soft: int, used: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
        monkeypatch.setattr("controlplane.bus.descriptors._open_now", lambda: used)

    return set_to


def test_few_descriptors_are_said_once_until_there_are_more(
    limit: Callable[[int, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    descriptors = Descriptors()
    warned = []
    for turn, used in enumerate((800, 801, 900, 400, 900)):
        limit(1000, used)
        descriptors.check(turn * CHECK_US, agents=300)
        warned.append((bool(descriptors.warning), len(caplog.records)))
    assert warned == [(False, 0), (True, 1), (True, 1), (False, 1), (True, 2)]
    assert descriptors.warning.startswith(
        "100 of 1000 file descriptors are left in the trainer's process: room for 350"
    )
    limit(1000, 400)
    descriptors.check(4 * CHECK_US + 1, agents=300)  # not yet time to look again
    assert descriptors.warning


def test_the_status_says_that_few_descriptors_are_left(tmp_path: Path, limit: Callable[[int, int], None]) -> None:
    limit(1000, 990)
    with ControlPlane(ADDRESS, log=tmp_path / "run.db") as plane:
        plane.flush().wait(10)
        status = plane.status()
    assert "room for 5 agents" in status.descriptors and status.warnings == (status.descriptors,)
    assert f"  {status.descriptors}" in str(status).splitlines()


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_the_sockets_of_a_context_do_not_limit_the_connections_of_a_bus() -> None:
    own, others, agents = Context(), Context(), 40
    own.set(zmq.MAX_SOCKETS, 2)
    async with bus_router(own, ADDRESS) as router, bus_publisher(own, ADDRESS):
        with pytest.raises(zmq.ZMQError):
            own.socket(zmq.DEALER)
        async with AsyncExitStack() as stack:
            for number in range(agents):
                dealer = await stack.enter_async_context(agent_dealer(others, router.address))
                await dealer.send([str(number).encode()])
            with anyio.fail_after(30):
                arrived = {int((await router.recv())[1]) for _ in range(agents)}
    assert arrived == set(range(agents))
    own.destroy(0)
    others.destroy(0)
