"""Replicas behind the gateway that fail, leave, come back or lag, as trainers and routers meet them."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.engines.http_servers import HttpServer
from tests.trainers.gateway_fleet import MODEL, GatewayFleet, digest_of, gateway_fleet
from tests.trainers.posting_trainers import HTTP, PrimeRL, Slime, SlimRouter
from tests.waiting import until, wait_until

# --- a router in between ----------------------------------------------------------------------------------------------


def test_the_slim_router_shuns_no_replica_that_says_that_it_does_not_serve_now(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    """It is tried again each time, and so it is there again as soon as it serves."""
    with gateway_fleet(tmp_path, ports=True, engines=[server.url for server in servers]) as fleet:
        router = SlimRouter(fleet.urls)
        assert router.models == [(MODEL, "null")] * 2
        fleet.stop_agent(1)
        wait_until(lambda: HTTP.get(f"{fleet.urls[1]}/health").status_code == 503)
        answers = [router.generate({}).status_code for _ in range(8)]
        assert answers == [200, 503] * 4 and set(router.failures.values()) == {0}
        fleet.start_agent(1)
        wait_until(lambda: HTTP.get(f"{fleet.urls[1]}/health").status_code == 200)
        assert [router.generate({}).status_code for _ in range(2)] == [200, 200]


# --- one replica fails ------------------------------------------------------------------------------------------------


def test_a_replica_that_cannot_load_is_quarantined_and_the_trainer_goes_on(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    roots = [tmp_path / "run", tmp_path / "run", tmp_path / "elsewhere"]
    engines = [servers[0].url, servers[1].url, servers[1].url]
    with gateway_fleet(tmp_path, replicas=3, engines=engines, roots=roots) as fleet:
        trainer = PrimeRL(fleet.urls)
        asyncio.run(trainer.update_weights(fleet.write("step_1", 1)))
        assert fleet.syncs() == [("committed", (0, 1))]
        assert {status for _, status in trainer.attempts} == {"200"}
        wait_until(lambda: HTTP.get(f"{fleet.urls[2]}/health").status_code == 503)
        assert "quarantined" in HTTP.get(f"{fleet.urls[2]}/health").json()["message"]
        assert HTTP.post(f"{fleet.urls[2]}/generate", json={}).status_code == 503
        assert HTTP.post(f"{fleet.urls[1]}/generate", json={}).status_code == 200


def test_a_cause_that_passes_is_tried_again_and_one_that_lasts_is_not(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    """An agent that restarts, while both replicas must load; then a checkpoint of another shape."""
    with gateway_fleet(tmp_path, engines=[server.url for server in servers], quorum=2, moment_s=0.05) as fleet:
        body = {"weight_dir": str(fleet.write("step_1", 1))}
        fleet.stop_agent(1)
        wait_until(lambda: HTTP.get(f"{fleet.urls[1]}/health").status_code == 503)
        away = HTTP.post(f"{fleet.urls[0]}/update_weights", json=body)
        assert away.status_code == 503 and int(away.headers["retry-after"]) > 0 and "1.0: missing (absent" in away.text
        assert HTTP.get(f"{fleet.urls[1]}/health").headers["retry-after"] == away.headers["retry-after"]
        enough = HTTP.post(f"{fleet.gateway.url}/v1/rl/syncs", json={"model_path": body["weight_dir"], "quorum": 1})
        assert enough.status_code == 200 and enough.json()["workers"]["1"]["verdict"] == "unproven"
        fleet.start_agent(1)
        wait_until(lambda: len(fleet.plane.serving()) == 2)
        trainer = PrimeRL(fleet.urls)
        asyncio.run(trainer.update_weights(fleet.folder / "run" / "step_1"))
        assert fleet.syncs() == [("aborted", ()), ("committed", (0,)), ("committed", (0, 1))]

        body = {"weight_dir": str(fleet.write("step_2", 2, hidden=32))}
        lasts = HTTP.post(f"{fleet.urls[0]}/update_weights", json=body)
        assert lasts.status_code == 409 and "retry-after" not in lasts.headers and "source_refused" in lasts.text


def test_a_replica_that_comes_back_after_its_checkpoint_was_removed_waits_for_the_next_update(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    with gateway_fleet(tmp_path, replicas=3, ports=True, engines=[servers[0].url] * 3) as fleet:
        trainer = Slime(fleet.addresses)
        fleet.stop_agent(2)
        trainer.reload(fleet.write("weight_v000001", 1), "1")  # and the files are removed
        assert fleet.syncs() == [("committed", (0, 1))]
        assert HTTP.get(f"{fleet.urls[2]}/health").status_code == 503
        fleet.start_agent(2)
        wait_until(lambda: "quarantined since v1" in HTTP.get(f"{fleet.urls[2]}/health").json()["message"])
        assert HTTP.post(f"{fleet.urls[2]}/generate", json={}).status_code == 503

        trainer.reload(fleet.write("weight_v000002", 2), "2")
        assert fleet.syncs()[-1] == ("committed", (0, 1, 2)) and fleet.digests() == [digest_of(2)] * 3
        assert HTTP.get(f"{fleet.urls[2]}/health").status_code == 200
        assert HTTP.post(f"{fleet.urls[2]}/generate", json={}).status_code == 200


def test_requests_go_where_agents_say_that_their_servers_are_until_the_replica_leaves(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    with gateway_fleet(tmp_path, endpoints=[f"{servers[0].url}/", ""]) as fleet:
        assert HTTP.post(f"{fleet.urls[0]}/generate", json={}).status_code == 200 and len(servers[0].requests) == 1
        refused = HTTP.post(f"{fleet.urls[1]}/generate", json={})
        assert refused.status_code == 400 and "start agents with `--url`" in refused.text
        assert [HTTP.get(f"{url}/health").status_code for url in fleet.urls] == [200, 200]
        assert fleet.plane.endpoints() == {0: servers[0].url}
        fleet.plane.drain(0, grace=20).wait(timeout=60)
        left = HTTP.post(f"{fleet.urls[0]}/generate", json={})
        assert left.status_code == 503 and "it was retired" in left.text
        workers = HTTP.get(f"{fleet.gateway.url}/workers").json()["workers"]
        assert [worker["url"] for worker in workers] == [fleet.urls[1]] and fleet.plane.endpoints() == {}


def test_a_replica_that_missed_updates_or_was_retired_gets_no_requests_and_is_in_no_list(
    tmp_path: Path, servers: list[HttpServer]
) -> None:
    """Its agent is killed and its engine lives on, with the weights of two updates ago."""
    with gateway_fleet(tmp_path, replicas=3, engines=[servers[0].url] * 3) as fleet:

        def workers() -> list[str]:
            return [worker["url"] for worker in HTTP.get(f"{fleet.gateway.url}/workers").json()["workers"]]

        def asked() -> tuple[int, str]:
            answer = HTTP.post(f"{fleet.urls[2]}/generate", json={})
            return answer.status_code, answer.text

        assert asked()[0] == 200 and workers() == fleet.urls
        fleet.stop_agent(2)
        wait_until(lambda: asked()[0] == 503)
        trainer = PrimeRL(fleet.urls)
        for step in (1, 2):
            asyncio.run(trainer.update_weights(fleet.write(f"step_{step}", step)))
        assert "its agent is left" in asked()[1] and workers() == fleet.urls[:2]
        fleet.plane.retire(2).wait()
        assert "it was retired" in asked()[1] and workers() == fleet.urls[:2]
        assert HTTP.get(f"{fleet.urls[2]}/health").status_code == 503
        assert HTTP.post(f"{fleet.urls[0]}/generate", json={}).status_code == 200


def test_during_an_update_requests_go_on_to_the_engines_that_take_part(fleet: GatewayFleet) -> None:
    trainer = PrimeRL(fleet.urls)
    asyncio.run(trainer.update_weights(fleet.write("step_1", 1)))
    for gated in fleet.engines:
        gated.may_load.clear()

    async def update() -> None:
        updating = asyncio.create_task(trainer.update_weights(fleet.write("step_2", 2)))
        await until(lambda: fleet.plane.serving() == {})  # paused
        for url in fleet.urls:
            answer = await asyncio.to_thread(HTTP.post, f"{url}/generate", json={})
            assert answer.status_code == 200, answer.text
        for gated in fleet.engines:
            gated.may_load.set()
        await updating

    asyncio.run(update())


def test_a_trainer_that_went_back_a_step_loads_what_it_wrote_to_the_same_path(fleet: GatewayFleet) -> None:
    """Killed in an update, whose answer nothing reads; restarted a step earlier, it writes other weights there."""
    for gated in fleet.engines:
        gated.may_load.clear()
    body = {"weight_dir": str(fleet.write("step_1", 1))}
    for url in fleet.urls:
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{url}/update_weights", json=body, timeout=0.2)
    fleet.write("step_1", 2)
    early = HTTP.post(f"{fleet.urls[0]}/update_weights", json=body)
    assert early.status_code == 503 and "written again" in early.json()["message"]
    for gated in fleet.engines:
        gated.may_load.set()
    wait_until(lambda: len(fleet.syncs()) == 1)
    asyncio.run(PrimeRL(fleet.urls).update_weights(fleet.folder / "run" / "step_1"))
    assert fleet.digests() == [digest_of(2)] * 2 and len(fleet.syncs()) == 2
