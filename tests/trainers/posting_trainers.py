"""Clients that post to engines as trainers do: the same requests, order, retries, time-outs and status codes.

Written anew after reading the trainers' code; each names the file, the functions and the commit that taught it. What a
trainer waits between two attempts is left out, and its time-outs are arguments.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from shutil import rmtree
from typing import Any

import httpx

HTTP = httpx.Client(verify=False, timeout=30)  # reading all certificates of the machine takes long, for each client


class PrimeRL:
    """prime-rl's orchestrator, 559b44772, `src/prime_rl/utils/client.py`.

    `setup_admin_clients`, `check_health`, `maybe_check_has_model`, `update_weights` with its pauses and resumes, and
    `_admin_post`: a 5xx and a time-out are tried again up to ten times, a 4xx ends at once. `asyncio.gather` raises the
    first error, and the resume follows while other posts may still wait.
    """

    more: Mapping[str, object] = {}
    """Fields of an update."""

    def __init__(self, urls: Sequence[str], timeout_s: float = 30.0) -> None:
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._timeout_s = timeout_s
        self.attempts: list[tuple[str, str]] = []
        """What each attempt came to, by path."""

    async def update_weights(self, weight_dir: Path | None, lora_name: str | None = None) -> None:
        """With a `lora_name` it is `load_lora_adapter`: no pause, and a 404 and a 500 are tried again, but no 503."""
        async with self._clients() as clients:
            if lora_name is not None and weight_dir is not None:
                body: Any = {"lora_name": lora_name, "lora_path": weight_dir.as_posix()}
                again = (404, 500)
                posts = [self._post(client, "/load_lora_adapter", again=again, json=body) for client in clients]
                await asyncio.gather(*posts)
                return
            pause = {"mode": "keep", "clear_cache": "false"}
            await asyncio.gather(*[self._post(client, "/pause", params=pause) for client in clients])
            try:
                if weight_dir is not None:
                    marker = weight_dir / "NCCL_READY"
                    marker.parent.mkdir(parents=True, exist_ok=True)
                    marker.touch()
                body = {"weight_dir": weight_dir.as_posix() if weight_dir is not None else None, **self.more}
                await asyncio.gather(*[self._post(client, "/update_weights", json=body) for client in clients])
            finally:
                await asyncio.gather(*[self._post(client, "/resume") for client in clients])

    async def wait_for_ready(self, model: str | None = None) -> None:
        async with self._clients() as clients:
            for response in await asyncio.gather(*[client.get("/health") for client in clients]):
                if response.status_code != 404:
                    response.raise_for_status()
            if model is not None:
                for response in await asyncio.gather(*[client.get("/v1/models") for client in clients]):
                    assert any(entry["id"] == model for entry in response.json()["data"])

    def _clients(self) -> "_Clients":
        return _Clients(self._urls, self._timeout_s)

    async def _post(
        self, client: httpx.AsyncClient, path: str, again: Sequence[int] = range(500, 600), **arguments: Any
    ) -> None:
        for attempt in range(1, 11):
            try:
                response = await client.post(path, **arguments)
                self.attempts.append((path, str(response.status_code)))
                response.raise_for_status()
                return
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in again or attempt == 10:
                    raise
            except httpx.TransportError as error:
                self.attempts.append((path, type(error).__name__))
                if attempt == 10:
                    raise


class AdminPlane(PrimeRL):
    """prime-rl's newer client, 009c0303, `src/prime_rl/orchestrator/clients.py`: `AdminPlane`, `load_lora_adapter`."""

    more: Mapping[str, object] = {"version_uid": None}


class DynamoAdmin:
    """prime-rl's other admin plane, 02e7f45f, `src/prime_rl/inference/dynamo.py`: of engines that a Dynamo has found.

    `discover_dynamo_worker`, `parse_dynamo_worker`, `topology_fingerprint`, `wait_for_ready`,
    `ensure_topology_current`, `_collective_rpc` and `update_weights` by files. It takes one worker of one rank, and
    ends if that worker changes.
    """

    def __init__(self, discovery_url: str, model: str) -> None:
        self._url, self._model = httpx.URL(discovery_url), model
        self.pinned: tuple[int, str] | None = None

    async def discover(self) -> tuple[int, str]:
        path = self._url.path.rstrip("/").removesuffix("/v1")
        async with httpx.AsyncClient(verify=False) as client:
            response = await client.get(self._url.copy_with(path=f"{path}/v1/rl/workers"))
        snapshot = response.raise_for_status().json()
        assert snapshot["protocol_version"] in (1, None)
        workers = [worker for worker in snapshot["workers"] if worker.get("model") == self._model]
        if any(worker.get("error") is not None for worker in workers):
            raise LookupError("Dynamo worker is not ready")
        if not workers:
            raise LookupError("Dynamo returned no bound workers")
        for worker in workers:
            if type(worker.get("world_size", 1)) is not int or worker.get("world_size", 1) != 1:
                raise ValueError("Dynamo RL currently supports exactly one inference rank")
            admin = httpx.URL(worker["admin_base_url"])
            if admin.path != "/" or admin.query or admin.userinfo or admin.fragment:
                raise ValueError("admin_base_url must be an http(s) origin")
            if admin.host != self._url.host:
                raise ValueError("Dynamo worker admin host does not match discovery host")
        if len(workers) != 1:
            raise ValueError("Dynamo RL currently supports exactly one inference worker")
        return workers[0]["instance_id"], workers[0]["admin_base_url"]

    async def wait_for_ready(self) -> None:
        found = await self.discover()
        assert await self.discover() == found
        async with httpx.AsyncClient(verify=False, base_url=found[1]) as client:
            (await client.get("/health")).raise_for_status()
        self.pinned = found

    async def update_weights(self, weight_dir: Path) -> None:
        assert self.pinned is not None
        assert await self.discover() == self.pinned, "Dynamo worker topology changed after initialization"
        async with httpx.AsyncClient(verify=False, base_url=self.pinned[1], timeout=30) as client:
            pause = {"mode": "keep", "clear_cache": "false"}
            (await client.post("/pause", params=pause)).raise_for_status()
            body = {
                "method": "update_weights_from_path",
                "timeout": 720.0,
                "args": [weight_dir.as_posix()],
                "kwargs": {},
            }
            response = (await client.post("/collective_rpc", json=body)).raise_for_status()
            if response.json() != {"results": [None]}:
                raise ValueError("Dynamo worker returned an invalid collective RPC response")
            (await client.post("/resume")).raise_for_status()


class SlimRouter:
    """SGLang's slim router (`experimental/sgl-router/src`) with `--worker-urls`, one after the other.

    `discovery/static_urls.rs` (098972f2): no worker ever leaves. `workers/introspect.rs` (098e0c78): each is asked once
    what it is. `health/circuit_breaker.rs` (082f7d82): three failures in a row and it is left out for a while; a 503 is
    none of them, since a busy worker answers so.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.failures = dict.fromkeys(urls, 0)
        self.models: list[tuple[str, str]] = []
        for url in urls:
            info = HTTP.get(f"{url}/server_info", timeout=2).raise_for_status().json()
            self.models.append((info["served_model_name"], info["disaggregation_mode"]))
        self._turns = itertools.count()

    def generate(self, body: object) -> httpx.Response:
        admitted = [url for url, failed in self.failures.items() if failed < 3]
        url = admitted[next(self._turns) % len(admitted)]
        response = HTTP.post(f"{url}/generate", json=body)
        if response.is_success:
            self.failures[url] = 0
        elif response.is_server_error and response.status_code != 503:
            self.failures[url] += 1
        return response


class SkyRL:
    """SkyRL's delta transport, a9564572, `skyrl/backends/skyrl_train`.

    `inference_servers/remote_inference_client.py` (`_call_all_servers`, `get_world_size`,
    `init_weight_update_communicator`, `fetch_weights`, `pause`, `resume`, …) and `weight_sync/delta_strategy.py`
    (`DeltaInitInfo.to_api_payload`, `_apply_receiver_update`). No attempt is repeated, and nothing has a time-out.
    """

    def __init__(self, urls: Sequence[str], local_checkpoint_dir: Path) -> None:
        self.urls, self._local = urls, local_checkpoint_dir
        self.world_sizes: list[int] = []

    async def init_weight_update_communicator(self) -> None:
        info = {
            "base_model_path": "base",
            "local_checkpoint_dir": str(self._local),
            "cloud_download_workers": 4,
            "checkpoint_load_format": "vllm_multi_thread_safetensors",
            "multi_thread_safetensors_max_workers": 8,
        }
        answers = await self._all("/get_world_size", {}, method="GET")
        self.world_sizes = [answer["world_size"] for answer in answers]
        await self._all("/init_weight_transfer_engine", {"init_info": info})

    async def send(self, version: int, sync_dir: str) -> None:
        update = {"target_version": version, "version": version, "sync_dir": sync_dir, "uri": f"{sync_dir}/delta"}
        await self._all("/fetch_weights", {"target_version": version, "sync_dir": sync_dir, "uri": update["uri"]})
        await self._all("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            await self._all("/reset_prefix_cache", {"reset_running_requests": True})
            start = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
            await self._all("/collective_rpc", start)
            await self._all("/update_weights", {"update_info": update})
            await self._all("/collective_rpc", {"method": "skyrl_finish_weight_update"})
        finally:
            await self._all("/resume")

    async def _all(
        self, endpoint: str, body: object = None, method: str = "POST", params: dict[str, str] | None = None
    ) -> list[Any]:
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            calls = [client.request(method, f"{url}{endpoint}", json=body, params=params) for url in self.urls]
            answers = [response.raise_for_status() for response in await asyncio.gather(*calls)]
            return [answer.json() if answer.content else None for answer in answers]


class Slime:
    """slime, 624b824a8, with external engines and weights by disk.

    `slime/ray/actor_group.py` (`_reload_rollout_weights_from_disk`), and in `slime/backends/sglang_utils` the files
    `sglang_engine.py` (one Ray actor for each engine: here a thread) and `external.py` (`discover_external_engines`).
    Nothing is tried again but the flush, nothing has a time-out, and there is no `finally`.
    """

    def __init__(self, addresses: Sequence[str], *, keep_files: bool = False, ci_test: bool = False) -> None:
        self._urls = [f"http://{address}" for address in addresses]
        self._keep_files, self._ci_test = keep_files, ci_test

    def discover(self) -> list[dict[str, Any]]:
        """Topology of the engines."""
        infos = []
        for url in self._urls:
            response = HTTP.get(f"{url}/server_info", timeout=30)
            response.raise_for_status()
            infos.append(response.json())
        return infos

    def reload(self, directory: Path, weight_version: str) -> None:
        self._all("POST", "pause_generation", {})
        self._flush()
        self._all("POST", "update_weights_from_disk", {"model_path": str(directory), "weight_version": weight_version})
        if self._ci_test:
            versions = [answer["weight_version"] for answer in self._all("GET", "get_weight_version")]
            assert all(str(version) == weight_version for version in versions), versions
        if not self._keep_files:
            rmtree(directory, ignore_errors=True)
        self._all("POST", "continue_generation", {})

    def _flush(self) -> None:
        for url in self._urls:
            for _ in range(60):
                if HTTP.get(f"{url}/flush_cache", timeout=None).status_code == 200:
                    break
            else:
                raise TimeoutError("Timeout while flushing cache.")

    def _all(self, method: str, endpoint: str, body: object = None) -> list[Any]:
        def call(url: str) -> Any:
            response = HTTP.request(method, f"{url}/{endpoint}", json=body, timeout=None)
            response.raise_for_status()
            return response.json()

        with ThreadPoolExecutor() as actors:
            return list(actors.map(call, self._urls))


class Miles(Slime):
    """miles, 31f1ca961, with weights by disk-delta: `…/update_weight_from_distributed/delta.py` (`_reload_engines`).

    Each engine pulls into its host's local checkpoint before the pause, the mode of the pause is named, and the results
    must say `success` (`_check_weight_sync_results`).
    """

    def __init__(self, addresses: Sequence[str], local_checkpoint_dir: Path, mode: str = "retract") -> None:
        super().__init__(addresses, keep_files=True, ci_test=True)
        self._local, self._mode = local_checkpoint_dir, mode

    def init_external(self) -> None:
        """`miles/backends/sglang_utils/sglang_engine.py`: `_init_external` with `_wait_server_healthy`."""
        for url in self._urls:
            headers = {"Content-Type": "application/json; charset=utf-8", "Authorization": "Bearer None"}
            for path in ("health_generate", "flush_cache"):
                assert HTTP.get(f"{url}/{path}", headers=headers).status_code == 200
            info = HTTP.get(f"{url}/get_server_info").raise_for_status().json()
            assert f"http://{info['host']}:{info['port']}" == url, info

    def discover_external(self, gpus: int) -> None:
        """29f1038a, `miles/ray/rollout/external_engine_provider.py`: `_discover_external_engine`, its assertions.

        Then `server_cell.py` with `sglang_api_client.py` (`wait_server_healthy`), 01fe171c and 05265435.
        """
        assert len({*self._urls}) == len(self._urls)
        found = 0
        for url in self._urls:
            address = httpx.URL(url)
            assert address.host and address.port and address.path == "/"
            info = HTTP.get(f"{url}/server_info", timeout=5).raise_for_status().json()
            assert info.get("disaggregation_mode") not in ("prefill", "decode")
            found += int(info["internal_states"][0]["world_size"])
            for path in ("health_generate", "flush_cache"):
                assert HTTP.get(f"{url}/{path}").status_code == 200
        assert found == gpus

    def reload(self, directory: Path, weight_version: str) -> None:
        local = str(self._local)
        pull = {"local_checkpoint_dir": local, "source_dir": str(directory), "target_version": int(weight_version)}
        self._all("POST", "pull_weights", pull)
        self._all("POST", "pause_generation", {"mode": self._mode})
        if self._mode != "in_place":
            self._flush()
        body = {"model_path": local, "weight_version": weight_version}
        results = self._all("POST", "update_weights_from_disk", body)
        assert all(result["success"] for result in results), results
        self._all("POST", "continue_generation", {})


class AReaL:
    """AReaL, cbff54d64, with weights by disk, for SGLang: it pauses twice, `{}` and then `in_place`; 1.0.4 only once.

    `areal/engine/fsdp_engine.py` (`_update_weights_from_disk`: the pause comes before the files are written),
    `areal/infra/remote_inf_engine.py` (`pause_generation`, `_update_weights_from_disk`, `clear_checkpoint_after_load`),
    `areal/infra/utils/http.py` (`arequest_with_retry`: any error is tried again, a 4xx too, three times in all), and
    the routes of `areal/engine/sglang_remote.py` (`get_pause_requests`).
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self.attempts: list[tuple[str, int]] = []

    async def initialize(self) -> None:
        for address in self._addresses:
            async with httpx.AsyncClient(verify=False) as client:
                response = await client.request("GET", f"http://{address}/health", json={}, timeout=30)
                assert response.status_code == 200, response.text

    async def update_weights(self, directory: Path, save: Callable[[], object]) -> None:
        body = {"model_path": str(directory), "abort_all_requests": True}
        await self._update(directory, save, "/update_weights_from_disk", body)

    async def update_adapter(self, name: str, version: int, directory: Path, save: Callable[[], object]) -> None:
        body = {"lora_name": f"{name}-v{version}", "lora_path": str(directory)}
        await self._update(directory, save, "/load_lora_adapter", body)

    async def _update(self, directory: Path, save: Callable[[], object], endpoint: str, body: object) -> None:
        await self._all("/pause_generation", {})
        await self._all("/pause_generation", {"mode": "in_place"})
        save()
        await self._all(endpoint, body)
        rmtree(directory, ignore_errors=True)
        await self._all("/continue_generation", {})

    async def _all(self, endpoint: str, body: object) -> None:
        async with httpx.AsyncClient(timeout=3600, verify=False) as client:
            await asyncio.gather(*[self._post(client, address, endpoint, body) for address in self._addresses])

    async def _post(self, client: httpx.AsyncClient, address: str, endpoint: str, body: object) -> None:
        for _ in range(3):
            try:
                response = await client.post(f"http://{address}{endpoint}", json=body)
                self.attempts.append((endpoint, response.status_code))
                response.raise_for_status()
                return
            except httpx.HTTPError as error:
                last = error
        raise RuntimeError(f"Failed after 3 retries each. Endpoint: {endpoint}. Last error: {last!r}")


class _Clients:
    """One client for each URL, as prime-rl has."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        self._urls, self._timeout_s, self._stack = urls, timeout_s, AsyncExitStack()

    async def __aenter__(self) -> list[httpx.AsyncClient]:
        timeout = httpx.Timeout(connect=10.0, read=self._timeout_s, write=60.0, pool=10.0)
        limits = httpx.Limits(max_connections=4, max_keepalive_connections=1)
        return [
            await self._stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, verify=False)
            )
            for url in self._urls
        ]

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
