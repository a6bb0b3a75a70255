"""The gateway in front of a real vLLM on the CPU, driven as prime-rl and SkyRL drive their engines."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from controlplane.trainers.gateway.service import Gateway
from tests.engines.servers import VLLM_TOKENS, begin, complete
from tests.engines.vllm_fleet import VLLMFleet
from tests.trainers.gateway_fleet import on_a_thread
from tests.trainers.posting_trainers import PrimeRL

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(480)]

ENDLESS = VLLM_TOKENS - 100
"""Tokens of a request that runs until it is closed."""


@pytest.fixture
def gateway(vllm_fleet: VLLMFleet) -> Iterator[Gateway]:
    engines = [vllm_fleet.first.url, vllm_fleet.second_url]
    served = Gateway(vllm_fleet.plane, replicas=2, checkpoints=vllm_fleet.folder, engines=engines, timeout_s=60)
    with on_a_thread(served.serve):
        yield served
    vllm_fleet.version = vllm_fleet.plane.status().version  # the fleet's other tests count on from here
    vllm_fleet.rest()
    vllm_fleet.sync("a").raise_unless_committed()  # as it was found


def tokens(gateway: Gateway, fleet: VLLMFleet) -> list[list[int]]:
    """Greedy tokens of both replicas, asked for through the gateway once both serve: it refuses one that reads late."""
    fleet.wait_ready()
    return [complete("vllm", url, "hello", 8, fleet.first.model) for url in gateway.base_urls()]


def test_prime_rl_moves_both_servers_while_a_request_streams_through_the_gateway(
    gateway: Gateway, vllm_fleet: VLLMFleet
) -> None:
    trainer = PrimeRL([f"{url}/v1" for url in gateway.base_urls()], timeout_s=120)
    asyncio.run(trainer.wait_for_ready(vllm_fleet.first.model))
    asyncio.run(trainer.update_weights(vllm_fleet.folder / "b"))
    second = tokens(gateway, vllm_fleet)
    assert second[0] == second[1] == vllm_fleet.tokens()[0]

    with closing(begin("vllm", gateway.base_urls()[0], "a long one", ENDLESS, vllm_fleet.first.model)) as running:
        running.grows_to(1)
        asyncio.run(trainer.update_weights(vllm_fleet.folder / "c"))
        running.grows_to(len(running.tokens) + 8)  # prime-rl pauses with `keep`
    running.end()
    third = tokens(gateway, vllm_fleet)
    assert third[0] == third[1] != second[0]

    with pytest.raises(httpx.HTTPStatusError, match="409"):
        asyncio.run(trainer.update_weights(vllm_fleet.folder / "missing"))
    assert tokens(gateway, vllm_fleet) == third
    assert {status for _, status in trainer.attempts} == {"200", "409"}
