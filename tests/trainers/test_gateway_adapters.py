"""LoRA adapters through the gateway: trainers post them as to engines, and requests get the committed version's tokens.

Replicas are tiny engines with real low-rank adapters. Their tokens are asked for over HTTP, by the trainer's own names.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save as encoded

from controlplane.trainers.gateway.adapters import FOLDER
from controlplane.trainers.gateway.service import Gateway
from schemas.errors import EngineError
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.engines.tiny_lora import PROMPT, expected, lora
from tests.trainers.gateway_fleet import GatewayFleet, gateway_fleet, on_a_thread
from tests.trainers.posting_trainers import HTTP, AdminPlane, AReaL, PrimeRL
from tests.waiting import until, wait_until
from workers.engines.tiny.model import TinyConfig, TinyModel
from workers.engines.tiny.server import TinyClient

TOKENS = 6


class LoRAFleet:
    """A gateway, replicas behind it, and what a trainer writes and asks for."""

    def __init__(self, fleet: GatewayFleet, servers: list[HttpServer]) -> None:
        self.fleet, self.urls, self.run = fleet, fleet.urls, fleet.folder / "run"
        self.servers, self.engines = servers, [server.url for server in servers]

    def write(self, name: str, seed: int, *, rank: int = 2, prefix: str = "base_model.model.") -> Path:
        """Write an adapter as trainers do: into the same files, if they are there."""
        directory = self.run / name
        directory.mkdir(parents=True, exist_ok=True)
        modules = lora(seed, rank)
        tensors = {
            f"{prefix}{name}.lora_{side}.weight": pair[side == "B"] for name, pair in modules.items() for side in "AB"
        }
        (directory / "adapter_model.safetensors").write_bytes(encoded(tensors))  # as safetensors up to 0.7
        targets = sorted({name.rpartition(".")[2] for name in modules})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1.0, "target_modules": targets, "bias": "none"}
        with open(directory / "adapter_config.json", "w") as file:
            json.dump(config, file)
        (directory / "STABLE").touch()
        return directory

    def expected(self, replica: int, seed: int | None) -> list[int]:
        """Tokens of a replica's base weights with the adapter of a seed."""
        directory = None
        if seed is not None:
            directory = self.fleet.folder / f"expected-{seed}"
            if not directory.exists():
                shutil.copytree(self.write(f"scratch-{seed}", seed), directory)
        return expected(TinyModel(TinyConfig(), seed=100 + replica), directory, TOKENS)

    def ask(self, replica: int, model: str, field: str = "model") -> httpx.Response:
        """Ask for tokens at the URL of a replica."""
        path = "/v1/completions" if field == "model" else "/generate"
        return HTTP.post(f"{self.urls[replica]}{path}", json={"prompt": PROMPT, "max_tokens": TOKENS, field: model})

    def tokens(self, replica: int, model: str, field: str = "model") -> list[int]:
        answer = self.ask(replica, model, field)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["token_ids"]
        return tokens

    def serves(self, model: str, seed: int, replicas: Sequence[int] = (0, 1), field: str = "model") -> bool:
        """Whether requests that name the model get the tokens of that seed's adapter, on each replica."""
        return all(self.tokens(replica, model, field) == self.expected(replica, seed) for replica in replicas)

    def listed(self, replica: int) -> set[str]:
        """What the engine of a replica lists."""
        return set(self.fleet.held()[replica].adapters or ())

    def copies(self) -> list[str]:
        return sorted(place.name.rpartition(".")[0] for place in self.run.glob(f"{FOLDER}/*/*"))

    def adapter_syncs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        reports = [report for report in self.fleet.concluded() if getattr(report, "adapter", "")]
        return [(report.adapter, report.status, report.loaded) for report in reports]  # type: ignore[union-attr]


@contextmanager
def lora_fleet(folder: Path, replicas: int = 2, **options: Any) -> Iterator[LoRAFleet]:
    def answer(front: str, request: HttpRequest) -> Reply:
        """What a server of that engine answers."""
        if request.path not in ("/v1/completions", "/generate"):
            return (200, b"") if request.path == "/health" else (404, {"detail": "Not Found"})
        body = json.loads(request.body)
        model = body.get("model", body.get("lora_path")) or ""
        try:
            (made,) = TinyClient(front, timeout_s=20).generate([body["prompt"]], body["max_tokens"], 0.0, model)
        except EngineError as error:
            return 404, {"detail": str(error)}
        return 200, {"token_ids": made.tokens, "model": model}

    with ExitStack() as open_:
        fronts = [f"ipc://{folder}/front-{replica}" for replica in range(replicas)]
        servers = [open_.enter_context(HttpServer(partial(answer, front))) for front in fronts]
        engines = [server.url for server in servers]
        fleet = open_.enter_context(gateway_fleet(folder, replicas=replicas, engines=engines, **options))
        yield LoRAFleet(fleet, servers)


@pytest.fixture
def lora_run(tmp_path: Path) -> Iterator[LoRAFleet]:
    with lora_fleet(tmp_path) as made:
        yield made


# --- prime-rl: one name, a directory for each step, which it removes two steps later ----------------------------------

NAME = "r2-a1.0"  # as prime-rl names it by default


@pytest.mark.parametrize("client", [PrimeRL, AdminPlane])
def test_prime_rl_moves_both_replicas_to_each_version_of_its_adapter(
    lora_run: LoRAFleet, client: type[PrimeRL]
) -> None:
    trainer = client([f"{url}/v1" for url in lora_run.urls])
    base = [lora_run.tokens(replica, "") for replica in (0, 1)]
    for step in (1, 2, 3):
        directory = lora_run.write(f"broadcasts/step_{step}", step, prefix="")  # its names have no prefix
        asyncio.run(trainer.update_weights(directory, NAME))
        assert lora_run.serves(NAME, step)
        assert [lora_run.tokens(replica, "") for replica in (0, 1)] == base
        shutil.rmtree(lora_run.run / f"broadcasts/step_{step - 2}", ignore_errors=True)
    assert lora_run.adapter_syncs() == [(NAME, "committed", (0, 1))] * 3
    assert lora_run.ask(0, NAME).json()["model"] == f"{NAME}-v3"  # the answer says which version it was
    assert lora_run.serves(f"{NAME}-v2", 2)  # and a request may ask for one
    wait_until(lambda: lora_run.listed(0) == lora_run.listed(1) == {f"{NAME}-v2", f"{NAME}-v3"})
    wait_until(lambda: lora_run.copies() == [NAME] * 2)


def test_prime_rl_tries_again_until_its_files_are_there(lora_run: LoRAFleet) -> None:
    trainer, directory = PrimeRL(lora_run.urls), lora_run.run / "step_1"

    async def update() -> None:
        updating = asyncio.create_task(trainer.update_weights(directory, NAME))
        await until(lambda: ("/load_lora_adapter", "404") in trainer.attempts)
        lora_run.write("written", 1).rename(directory)  # its shared disk shows them late
        await updating

    asyncio.run(update())
    assert lora_run.serves(NAME, 1) and lora_run.adapter_syncs() == [(NAME, "committed", (0, 1))]


def test_prime_rl_is_told_in_its_error_why_an_adapter_is_refused_and_the_old_one_serves_on(
    lora_run: LoRAFleet,
) -> None:
    trainer = PrimeRL(lora_run.urls)
    asyncio.run(trainer.update_weights(lora_run.write("step_1", 1), NAME))
    broken = lora_run.write("step_2", 2)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(httpx.HTTPStatusError, match=r"409 .*v2 aborted.*r 3"):
        asyncio.run(trainer.update_weights(broken, NAME))
    assert lora_run.serves(NAME, 1)
    wait_until(lambda: lora_run.copies() == [NAME])


# --- SkyRL: one directory, which it overwrites ------------------------------------------------------------------------


# --- AReaL: a name for each version, and its directory is removed after the load --------------------------------------


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[LoRAFleet]:
    with lora_fleet(tmp_path, ports=True) as made:
        yield made


def test_the_newest_version_of_areal_is_not_unloaded_alone(ports: LoRAFleet) -> None:
    trainer = AReaL(ports.fleet.addresses)
    asyncio.run(trainer.update_adapter("lora", 1, ports.run / "v1", partial(ports.write, "v1", 1)))
    answer = HTTP.post(f"{ports.urls[0]}/unload_lora_adapter", json={"lora_name": "lora-v1"})
    assert answer.status_code == 409 and "Unload lora to drop the adapter" in answer.json()["message"]


# --- where a version is, and where it is not --------------------------------------------------------------------------


def test_a_replica_that_could_not_load_a_version_serves_its_base_and_another_answers_for_the_adapter(
    tmp_path: Path,
) -> None:
    roots = [tmp_path / "run", tmp_path / "run", tmp_path / "elsewhere"]
    with lora_fleet(tmp_path, 3, roots=roots) as fleet:
        asyncio.run(PrimeRL(fleet.urls).update_weights(fleet.write("step_1", 1), NAME))
        assert fleet.adapter_syncs() == [(NAME, "committed", (0, 1))]
        assert fleet.serves(NAME, 1) and fleet.tokens(2, "") == fleet.expected(2, None)
        assert fleet.tokens(2, NAME) == fleet.expected(0, 1)
        for replica in (0, 1):
            fleet.fleet.stop_agent(replica)
        wait_until(lambda: fleet.ask(2, NAME).status_code == 503)
        assert f"holds {NAME}-v1" in fleet.ask(2, NAME).json()["message"]
        assert fleet.ask(2, "").status_code == 200


def test_a_restarted_gateway_knows_what_the_trainers_names_stand_for(tmp_path: Path) -> None:
    with lora_fleet(tmp_path, ports=True) as fleet:
        trainer = AReaL(fleet.fleet.addresses)
        for version in (4, 5):
            asyncio.run(trainer.update_adapter("lora", version, fleet.run / "v", partial(fleet.write, "v", version)))
        again = Gateway(fleet.fleet.plane, replicas=2, checkpoints=fleet.run, engines=fleet.engines)
        with on_a_thread(again.serve):
            fleet.urls = again.base_urls()
            assert fleet.serves("lora-v5", 5) and fleet.serves("lora-v4", 4)


def test_adapters_that_were_synced_by_hand_have_the_names_of_the_run(lora_run: LoRAFleet) -> None:
    for number in (1, 2):
        lora_run.write(f"by-hand/{number}", number)
        lora_run.fleet.plane.sync_adapter("policy", None, f"by-hand/{number}").wait()
    assert lora_run.serves("policy", 2) and lora_run.serves("policy-v1", 1)
    assert lora_run.ask(0, "policy-v3").status_code == 404


def test_requests_for_tokens_are_read_for_the_names_of_adapters_and_bounded(
    lora_run: LoRAFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(PrimeRL(lora_run.urls).update_weights(lora_run.write("step_1", 1), NAME))
    url = f"{lora_run.urls[0]}/generate"
    for content in (b"{", b"[1]", b'{"model": NaN}'):
        answer = HTTP.post(url, content=content)
        assert answer.status_code == 400 and "not a JSON object" in answer.json()["message"]
    many = {"prompt": PROMPT, "max_tokens": 1, "lora_path": [NAME, None, "other"], "x": 1.50}
    seen = len(lora_run.servers[0].requests)
    HTTP.post(url, json=many)
    sent = json.loads(lora_run.servers[0].requests[seen].body)
    assert sent == {**many, "lora_path": [f"{NAME}-v1", None, "other"]}
    monkeypatch.setattr("controlplane.trainers.gateway.service.TOKENS_BYTES_MAX", 100)
    answer = HTTP.post(url, json={"prompt": [1] * 100})
    assert answer.status_code == 413 and "larger than 100 bytes" in answer.json()["message"]
