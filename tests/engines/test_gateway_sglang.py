"""The gateway in front of a real SGLang on the CPU, driven as slime and AReaL drive their engines."""

from collections.abc import Iterator
from shutil import copytree

import pytest

from controlplane.trainers.gateway.service import Gateway
from schemas.commands import Checkpoint
from tests.engines.servers import begin, complete
from tests.engines.sglang_fleet import SGLangFleet
from tests.trainers.gateway_fleet import on_a_thread
from tests.trainers.posting_trainers import HTTP, Slime

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(480)]

ENDLESS = 200
"""Tokens of a request that runs until it is aborted, once each forward lasts a while."""


@pytest.fixture
def gateway(sglang_fleet: SGLangFleet) -> Iterator[Gateway]:
    """For replica 0. The judge never syncs, and has no place in front of a trainer."""
    fleet = sglang_fleet
    served = Gateway(
        fleet.plane, replicas=1, checkpoints=fleet.folder, engines=[fleet.urls[0]], ports=True, timeout_s=60
    )
    with on_a_thread(served.serve):
        yield served
    fleet.rest()
    fleet.plane.sync_weights(None, Checkpoint("a"), timeout=60).wait().raise_unless_committed()  # as it was found


def tokens(gateway: Gateway, fleet: SGLangFleet) -> list[int]:
    """Greedy tokens, asked for through the gateway."""
    return complete("sglang", gateway.base_urls()[0], "hello", 8, fleet.model)


def test_slime_discovers_and_reloads_an_engine_behind_the_gateway(gateway: Gateway, sglang_fleet: SGLangFleet) -> None:
    fleet, (url,) = sglang_fleet, gateway.base_urls()
    trainer = Slime([url.removeprefix("http://")], ci_test=True)
    (info,) = trainer.discover()
    assert info["tp_size"] == 2
    fleet.slow_down(0.05)
    running = begin("sglang", url, "a long one", ENDLESS, None).grows_to(1)
    directory = copytree(fleet.folder / "b", fleet.folder / "weight_v000070")
    trainer.reload(directory, "70")
    assert len(running.all()) < ENDLESS and not directory.exists()  # its pause aborts, and it removes what it wrote
    fleet.slow_down(0)
    assert HTTP.get(f"{url}/model_info").json()["weight_version"] == "70" and fleet.label() != "70"
    second = tokens(gateway, fleet)
    assert second == fleet.tokens()
