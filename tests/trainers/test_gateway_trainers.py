"""The gateway, as five trainers use it: their own order, retries and status codes, over HTTP, against tiny engines."""

import asyncio
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import jsonschema
import pytest

from controlplane.plane import ControlPlane
from controlplane.trainers.gateway.service import Gateway
from tests.engines.http_servers import HttpServer
from tests.trainers.gateway_fleet import MODEL, QUICK, GatewayFleet, digest_of, gateway_fleet, on_a_thread
from tests.trainers.posting_trainers import HTTP, AdminPlane, AReaL, DynamoAdmin, Miles, PrimeRL, SkyRL, Slime
from tests.waiting import until, wait_until

OPENAPI = json.loads(Path("docs/gateway-openapi.json").read_text())


# --- prime-rl ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", [PrimeRL, AdminPlane])
def test_prime_rl_moves_the_fleet_step_by_step(fleet: GatewayFleet, client: type[PrimeRL]) -> None:
    trainer = client([f"{url}/v1" for url in fleet.urls])
    asyncio.run(trainer.wait_for_ready(MODEL))
    for step in (1, 2):
        asyncio.run(trainer.update_weights(fleet.write(f"step_{step}", step)))
        assert fleet.digests() == [digest_of(step)] * 2
        assert fleet.generates_on() == [step, step]
    assert fleet.syncs() == [("committed", (0, 1))] * 2 and fleet.operations() == []
    assert {status for _, status in trainer.attempts} == {"200"}


def test_prime_rl_is_told_at_once_of_a_checkpoint_that_cannot_be_loaded(fleet: GatewayFleet) -> None:
    trainer = PrimeRL(fleet.urls)
    asyncio.run(trainer.update_weights(fleet.write("step_1", 1)))
    with pytest.raises(httpx.HTTPStatusError, match="409 checkpoint refused: .*step_2"):
        asyncio.run(trainer.update_weights(fleet.folder / "run" / "step_2"))  # its marker, and no weights
    refused = [status for path, status in trainer.attempts if path == "/update_weights"][2:]
    assert set(refused) == {"409"} and len(refused) <= 2
    assert fleet.generates_on() == [1, 1]


def test_a_time_out_of_prime_rl_joins_the_sync_that_is_under_way(fleet: GatewayFleet) -> None:
    for gated in fleet.engines:
        gated.may_load.clear()
    trainer, directory = PrimeRL(fleet.urls, timeout_s=0.5), fleet.write("step_1", 1)

    async def update() -> None:
        updating = asyncio.create_task(trainer.update_weights(directory))
        await until(lambda: [path for path, _ in trainer.attempts].count("/update_weights") >= 4)
        for gated in fleet.engines:
            gated.may_load.set()
        await updating

    asyncio.run(update())
    assert ("/update_weights", "ReadTimeout") in trainer.attempts
    assert fleet.syncs() == [("committed", (0, 1))] and fleet.generates_on() == [1, 1]


# --- what Dynamo and smg serve ----------------------------------------------------------------------------------------


def test_prime_rl_finds_its_worker_as_in_a_dynamo_and_moves_the_whole_fleet_by_it(ports: GatewayFleet) -> None:
    """It takes one worker only, so it is told to look below the URL of one replica. An update is the fleet's anyway."""
    everywhere, trainer = DynamoAdmin(ports.gateway.url, MODEL), DynamoAdmin(f"{ports.urls[0]}/v1", MODEL)
    with pytest.raises(ValueError, match="exactly one inference worker"):
        asyncio.run(everywhere.discover())
    asyncio.run(trainer.wait_for_ready())
    assert trainer.pinned == (0, ports.urls[0])
    for step in (1, 2):
        asyncio.run(trainer.update_weights(ports.write(f"step_{step}", step)))
        assert ports.digests() == [digest_of(step)] * 2
    ports.stop_agent(0)  # its topology is pinned: a worker that left the list for a restart would end the run
    wait_until(lambda: HTTP.get(f"{ports.urls[0]}/health").status_code == 503)
    assert asyncio.run(trainer.discover()) == trainer.pinned


def test_a_worker_is_not_ready_for_dynamos_clients_before_its_agent_has_joined(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    with gateway_fleet(tmp_path, joined=1, engines=[servers[0].url] * 2, ports=True) as fleet:
        trainer = DynamoAdmin(fleet.urls[1], MODEL)
        with pytest.raises(LookupError, match="not ready"):
            asyncio.run(trainer.discover())
        fleet.start_agent(1)
        wait_until(lambda: HTTP.get(f"{fleet.urls[1]}/health").status_code == 200)
        asyncio.run(trainer.wait_for_ready())


def test_a_server_that_does_not_answer_has_no_model_that_is_known(tmp_path: Path) -> None:
    with (
        gateway_fleet(tmp_path, replicas=1, engines=["http://127.0.0.1:9"], ports=True) as fleet,
        pytest.raises(LookupError, match="no bound workers"),
    ):
        asyncio.run(DynamoAdmin(fleet.urls[0], MODEL).discover())


def test_dynamos_clients_are_refused_weights_over_nccl_with_what_to_set(ports: GatewayFleet) -> None:
    body = {"method": "init_broadcaster", "args": ["host", 1, 0, 1, 60, False, "default"]}
    answer = HTTP.post(f"{ports.urls[0]}/collective_rpc", json=body)
    assert answer.status_code == 400 and "filesystem" in answer.json()["message"]
    probe = {"method": "liveness_probe", "timeout": 1.0, "args": [], "kwargs": {}}
    assert HTTP.post(f"{ports.urls[0]}/collective_rpc", json=probe).json() == {"results": [None]}


# --- the run's own route ----------------------------------------------------------------------------------------------


def test_a_sync_is_one_request_with_a_verdict_for_each_worker_as_the_openapi_file_says(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    roots = [tmp_path / "run", tmp_path / "run", tmp_path / "elsewhere"]
    with gateway_fleet(tmp_path, replicas=3, engines=[servers[0].url] * 3, roots=roots) as fleet:
        url = f"{fleet.gateway.url}/v1/rl/syncs"

        def sync(directory: Path, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
            body = {"model_path": str(directory), "weight_version": "70", **fields}
            answer = HTTP.post(url, json=body, headers=headers)
            expected = OPENAPI["paths"]["/v1/rl/syncs"]["post"]["responses"][str(answer.status_code)]
            (content,) = expected["content"].values()
            jsonschema.validate(answer.json(), {**content["schema"], "components": OPENAPI["components"]})
            return answer

        done = sync(fleet.write("step_1", 1), mode="keep")
        assert (done.status_code, done.json()["status"], done.json()["version"]) == (200, "committed", 1)
        verdicts = {worker: said["verdict"] for worker, said in done.json()["workers"].items()}
        assert verdicts == {"0": "committed", "1": "committed", "2": "quarantined"}
        assert "source_refused" in done.json()["workers"]["2"]["prepare"]
        assert HTTP.get(f"{fleet.urls[0]}/get_weight_version").json() == {"weight_version": "70"}

        aborted = sync(fleet.write("step_2", 2, hidden=32))
        assert (aborted.status_code, aborted.json()["status"]) == (409, "aborted")
        assert "retry-after" not in aborted.headers
        assert {said["verdict"] for said in aborted.json()["workers"].values()} == {"unchanged", "quarantined"}
        assert sync(Path("/elsewhere")).status_code == 400 and sync(tmp_path / "run" / "none").status_code == 409
        assert sync(tmp_path, {"origin": "http://a.page"}).status_code == 403
        never = sync(fleet.folder / "run" / "step_1", quorum=4)  # no fleet of three ever meets it
        assert never.status_code == 400 and "quorum is 4, and there are 3 replicas" in never.text
        wait_until(lambda: fleet.plane.serving() == {0: 1, 1: 1})

        fleet.stop_agent(0)
        fleet.stop_agent(1)
        fleet.stop_agent(2)
        wait_until(lambda: not fleet.plane.serving())
        away = sync(fleet.folder / "run" / "step_1")
        assert away.status_code == 503 and away.headers["retry-after"]
        workers = HTTP.get(f"{fleet.gateway.url}/v1/rl/workers").json()
        (content,) = OPENAPI["paths"]["/v1/rl/workers"]["get"]["responses"]["200"]["content"].values()
        jsonschema.validate(workers, {**content["schema"], "components": OPENAPI["components"]})
        for worker, status in (("0", 200), ("7", 404)):
            answer = HTTP.get(f"{fleet.gateway.url}/v1/rl/workers/{worker}")
            (content,) = OPENAPI["paths"]["/v1/rl/workers/{id}"]["get"]["responses"][str(status)]["content"].values()
            jsonschema.validate(answer.json(), {**content["schema"], "components": OPENAPI["components"]})
            assert answer.status_code == status


# --- SkyRL ------------------------------------------------------------------------------------------------------------


def test_skyrl_fetches_deltas_on_its_engines_and_loads_them_by_a_sync(
    fleet: GatewayFleet, servers: list[HttpServer]
) -> None:
    local = fleet.folder / "run" / "local"
    trainer = SkyRL(fleet.urls, local)
    asyncio.run(trainer.init_weight_update_communicator())
    asyncio.run(trainer.send(1, "s3://bucket/run"))  # no tensor has changed: there is no patched checkpoint yet
    assert fleet.syncs() == []
    for version in (2, 3):
        fleet.write("local/weights", version)  # what the engines' fetch leaves on their hosts
        asyncio.run(trainer.send(version, "s3://bucket/run"))
        assert fleet.digests() == [digest_of(version)] * 2
    assert fleet.syncs() == [("committed", (0, 1))] * 2
    for server in servers:
        paths = [request.path for request in server.requests]
        assert paths == ["/get_world_size", "/init_weight_transfer_engine", *["/fetch_weights"] * 3]
    assert trainer.world_sizes == [1, 1]


def test_a_restarted_gateway_goes_on_with_skyrls_delta_from_the_log(
    fleet: GatewayFleet, servers: list[HttpServer]
) -> None:
    trainer = SkyRL(fleet.urls, fleet.folder / "run" / "local")
    asyncio.run(trainer.init_weight_update_communicator())
    fleet.write("local/weights", 1)
    asyncio.run(trainer.send(1, "s3://bucket/run"))
    address, root, engines = fleet.plane.address, fleet.folder / "run", [server.url for server in servers]
    fleet.plane.close()
    log = fleet.folder / "run.db"
    with (
        ControlPlane(address, log=log, run="resume", config=QUICK, checkpoints=root) as fleet.plane,
        ExitStack() as opened,
    ):
        again = Gateway(fleet.plane, replicas=2, checkpoints=root, engines=engines)
        opened.enter_context(on_a_thread(again.serve))
        fleet.plane.wait_for_agents(2, timeout=60).wait()
        trainer.urls = again.base_urls()
        fleet.write("local/weights", 2)
        asyncio.run(trainer.send(2, "s3://bucket/run"))
        assert fleet.digests() == [digest_of(2)] * 2
    assert fleet.syncs() == [("committed", (0, 1))] * 2


# --- slime and miles --------------------------------------------------------------------------------------------------


def test_slime_reloads_from_disk_and_removes_the_files(ports: GatewayFleet) -> None:
    trainer = Slime(ports.addresses, ci_test=True)
    assert [info["tp_size"] for info in trainer.discover()] == [1, 1]
    for version in (1, 2):
        directory = ports.write(f"weight_v{version:06d}", version)
        trainer.reload(directory, str(version))
        assert ports.digests() == [digest_of(version)] * 2 and not directory.exists()
    assert ports.syncs() == [("committed", (0, 1))] * 2 and ports.operations() == []
    trainer.reload(ports.write("weight_v000070", 3), "70")  # whatever the run counts
    model = HTTP.get(f"{ports.urls[0]}/model_info").json()
    assert model == {"weight_version": "70", "model_path": "/m"}


def test_slime_is_told_of_an_abort_and_its_engines_generate_on(ports: GatewayFleet) -> None:
    trainer = Slime(ports.addresses)
    trainer.reload(ports.write("weight_v000001", 1), "1")
    with pytest.raises(httpx.HTTPStatusError, match=r"409 weights v2 aborted: .*source_refused"):
        trainer.reload(ports.write("weight_v000002", 2, hidden=32), "2")
    # slime has no `finally`: its continue_generation never comes, and nothing is paused
    assert ports.syncs()[-1][0] == "aborted" and ports.generates_on() == [1, 1]


def test_miles_pulls_on_its_engines_and_loads_the_local_checkpoint(
    ports: GatewayFleet, servers: list[HttpServer]
) -> None:
    local = ports.folder / "run" / "local"
    trainer = Miles(ports.addresses, local)
    trainer.init_external()
    for version in (4, 5):  # whatever it counts, and whatever the run counts
        ports.write("local", version)
        trainer.reload(ports.folder / "deltas", str(version))
        assert ports.digests() == [digest_of(version)] * 2
    assert [request.path for request in servers[0].requests].count("/pull_weights") == 2


def test_miles_finds_its_external_engines_by_the_gateways_ports(ports: GatewayFleet) -> None:
    trainer = Miles(ports.addresses, ports.folder / "run" / "local")
    trainer.discover_external(gpus=4)
    ports.write("local", 3)  # the baseline, loaded again without a pause: `--check-weight-update-equal`
    for url in ports.urls:
        body = {"model_path": str(ports.folder / "run" / "local"), "weight_version": "0"}
        assert HTTP.post(f"{url}/update_weights_from_disk", json=body).json()["success"]
    assert ports.digests() == [digest_of(3)] * 2
    assert HTTP.get(f"{ports.urls[0]}/model_info").json()["weight_version"] == "0"
    others = HTTP.get(f"{ports.urls[0]}/parallelism_config", params={"rank": 0})
    assert others.status_code == 400 and "NCCL" in others.json()["message"]


def test_the_weights_checker_compares_what_engines_are_proven_to_hold(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    """`--check-weight-update-equal` of slime and miles: the first update must bring what was launched."""
    engines = [server.url for server in servers]

    def check(fleet: GatewayFleet, action: str) -> httpx.Response:
        return HTTP.post(f"{fleet.urls[0]}/weights_checker", json={"action": action})

    with gateway_fleet(tmp_path, engines=engines, ports=True, digests="always") as fleet:
        trainer = Slime(fleet.addresses)
        assert check(fleet, "compare").status_code == 409  # with nothing
        assert check(fleet, "snapshot").json()["success"] and check(fleet, "reset_tensors").json()["success"]
        assert fleet.digests()[0] == digest_of(100)  # as it was launched: nothing was reset
        trainer.reload(fleet.write("weight_v000001", 100), "1")
        assert (same := check(fleet, "compare")).json()["success"], same.text
        trainer.reload(fleet.write("weight_v000002", 2), "2")
        other = check(fleet, "compare")
        assert other.status_code == 409 and digest_of(2)[:12] in other.text and digest_of(100)[:12] in other.text
        assert check(fleet, "checksum").status_code == 400
        fleet.stop_agent(0)
        wait_until(lambda: check(fleet, "compare").status_code == 503)


def test_without_digests_the_weights_checker_says_that_it_does_not_know(ports: GatewayFleet) -> None:
    Slime(ports.addresses).reload(ports.write("weight_v000001", 1), "1")
    for action in ("snapshot", "compare"):
        answer = HTTP.post(f"{ports.urls[0]}/weights_checker", json={"action": action})
    assert answer.status_code == 409 and "--digests always" in answer.text


def test_a_version_that_is_named_after_the_load_is_that_of_the_proven_weights(ports: GatewayFleet) -> None:
    """miles, `update_weight_version`."""
    body = {"new_version": "7", "abort_all_requests": False}
    assert HTTP.post(f"{ports.urls[0]}/update_weight_version", json=body).json()["success"]
    versions = [HTTP.get(f"{url}/get_weight_version").json() for url in ports.urls]
    assert versions == [{"weight_version": "7"}] * 2  # of the weights of the launch
    Slime(ports.addresses, ci_test=True).reload(ports.write("weight_v000008", 1), "8")
    assert HTTP.get(f"{ports.urls[0]}/model_info").json()["weight_version"] == "8"
    ports.stop_agent(0)
    wait_until(lambda: HTTP.post(f"{ports.urls[0]}/update_weight_version", json=body).status_code == 503)
    assert HTTP.get(f"{ports.urls[1]}/get_weight_version").json() == {"weight_version": "8"}


# --- AReaL ------------------------------------------------------------------------------------------------------------


def test_areal_pauses_before_it_writes_and_nothing_stands_meanwhile(ports: GatewayFleet) -> None:
    trainer = AReaL(ports.addresses)
    asyncio.run(trainer.initialize())
    seen: list[list[int]] = []

    def save(version: int) -> None:
        seen.append(ports.generates_on())  # paused by the trainer, and generating
        ports.write(f"weight_update_v{version}", version)

    for version in (1, 2):
        directory = ports.folder / "run" / f"weight_update_v{version}"
        asyncio.run(trainer.update_weights(directory, partial(save, version)))
        assert ports.digests() == [digest_of(version)] * 2 and not directory.exists()
    assert seen == [[0, 0], [1, 1]]
    assert ports.syncs() == [("committed", (0, 1))] * 2
