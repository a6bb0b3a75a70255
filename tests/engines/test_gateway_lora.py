"""The gateway in front of a real vLLM with LoRA adapters, driven as prime-rl does: one name, other files each step."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from controlplane.trainers.gateway.adapters import FOLDER
from controlplane.trainers.gateway.service import Gateway
from tests.engines.adapters import save_adapter, tensors_of
from tests.engines.lora_fleet import MODULES, RANK, LoRAFleet, Scored, near
from tests.engines.servers import wait_for
from tests.trainers.gateway_fleet import on_a_thread
from tests.trainers.posting_trainers import PrimeRL

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(900)]

NAME = "r8-a8.0"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoRAFleet]:
    """Its requests go through the gateway."""
    with ExitStack() as open_:
        fleet = LoRAFleet("vllm", tmp_path_factory.mktemp("lora"), open_)
        gateway = Gateway(fleet.plane, replicas=1, checkpoints=fleet.folder, engines=[fleet.url], timeout_s=60)
        open_.enter_context(on_a_thread(gateway.serve))
        (fleet.url,) = gateway.base_urls()
        yield fleet


def broadcast(fleet: LoRAFleet, step: int, seed: int) -> Path:
    """Write an adapter with prime-rl's names of tensors, which have no prefix."""
    tensors = {name.removeprefix("base_model.model."): shape for name, shape in tensors_of(MODULES, RANK).items()}
    return save_adapter(fleet.folder / f"broadcasts/step_{step}", MODULES, RANK, seed, tensors)


def test_prime_rl_serves_each_version_under_its_one_name_and_a_killed_server_comes_back_without_its_files(
    fleet: LoRAFleet,
) -> None:
    trainer = PrimeRL([f"{fleet.url}/v1"], timeout_s=60)
    base = fleet.scores(None)
    made: list[Scored] = []
    for step, seed in enumerate((1, 2, 1), 1):
        directory = broadcast(fleet, step, seed)
        running = fleet.begin(NAME, 200) if made else None
        asyncio.run(trainer.update_weights(directory, NAME))
        shutil.rmtree(directory)
        wait_for("the replica serves the version", lambda: fleet.plane.adapters()[NAME].replicas == (0,), 60)
        made.append(fleet.scores(NAME))
        if running is not None:  # it ends on the version that it began with
            assert running.all()[:8] == [token for token, _ in made[-2]] and len(running.tokens) == 200
    a, b, again = made
    assert near(a, again) and not near(a, b) and not near(a, base) and not near(b, base)
    assert near(fleet.scores(None), base)

    with pytest.raises(httpx.HTTPStatusError, match="launched for 16"):
        save_adapter(fleet.folder / "wide", MODULES, 32)
        asyncio.run(trainer.update_weights(fleet.folder / "wide", NAME))
    assert near(fleet.scores(NAME), a)

    fleet.kill_server()
    wait_for("the server is gone", lambda: fleet.plane.adapters()[NAME].replicas == (), 60)
    wait_for("the replica serves the version again", lambda: fleet.plane.adapters()[NAME].replicas == (0,), 300)
    assert near(fleet.scores(NAME), a)
    wait_for("copies of old versions are gone", lambda: len([*fleet.folder.glob(f"{FOLDER}/*/*")]) == 2, 60)
