"""The gateway in front of real engines with LoRA adapters: vLLM, driven as prime-rl does, and SGLang, as AReaL does."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from controlplane.trainers.gateway.adapters import FOLDER
from controlplane.trainers.gateway.service import Gateway
from tests.engines.adapters import save_adapter, tensors_of
from tests.engines.lora_fleet import MODULES, RANK, LoRAFleet, Scored, near
from tests.engines.servers import wait_for
from tests.engines.surfaces import Kind
from tests.trainers.gateway_fleet import on_a_thread
from tests.trainers.posting_trainers import AReaL, PrimeRL

pytestmark = pytest.mark.timeout(900)

NAME = "r8-a8.0"


@contextmanager
def behind_a_gateway(kind: Kind, folder: Path) -> Iterator[LoRAFleet]:
    """A replica whose requests go through the gateway."""
    with ExitStack() as open_:
        fleet = LoRAFleet(kind, folder, open_)
        gateway = Gateway(fleet.plane, replicas=1, checkpoints=folder, engines=[fleet.url], timeout_s=60, ports=True)
        open_.enter_context(on_a_thread(gateway.serve))
        (fleet.url,) = gateway.base_urls()
        yield fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LoRAFleet]:
    with behind_a_gateway("vllm", tmp_path) as made:
        yield made


def broadcast(fleet: LoRAFleet, step: int, seed: int) -> Path:
    """Write an adapter with prime-rl's names of tensors, which have no prefix."""
    tensors = {name.removeprefix("base_model.model."): shape for name, shape in tensors_of(MODULES, RANK).items()}
    return save_adapter(fleet.folder / f"broadcasts/step_{step}", MODULES, RANK, seed, tensors)


@pytest.mark.engine_vllm
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


@pytest.mark.engine_sglang
def test_areal_gets_the_version_that_it_names(tmp_path: Path) -> None:
    with behind_a_gateway("sglang", tmp_path) as fleet:
        trainer = AReaL([fleet.url.removeprefix("http://")])
        base = fleet.scores(None)
        made: list[Scored] = []
        for version, seed in enumerate((1, 2, 1), 1):
            directory = tmp_path / f"weight_update_v{version}"
            save = partial(save_adapter, directory, MODULES, RANK, seed)
            asyncio.run(trainer.update_adapter("lora", version, directory, save))
            wait_for("the replica serves the version", lambda: fleet.plane.adapters()["lora"].replicas == (0,), 60)
            made.append(fleet.scores(f"lora-v{version}"))
        a, b, again = made
        assert near(a, again) and not near(a, b) and not near(a, base) and not near(b, base)
        assert near(fleet.scores("lora-v2"), b) and near(fleet.scores(None), base)
        assert {status for _, status in trainer.attempts} == {200}
