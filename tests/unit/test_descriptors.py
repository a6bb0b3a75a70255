"""File descriptors of the trainer's process: raised when a bus opens."""

import resource
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
import zmq

from controlplane.bus.descriptors import PER_AGENT, raise_limit
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
