"""The backends attached to stand-ins of every release that is read, over HTTP and in process.

A stand-in is made from the release's own source and is stricter than the real one: an unknown parameter is an error.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from schemas.commands import Checkpoint, ProfilePlan, Window
from schemas.desired import ProfileSession
from schemas.errors import CheckpointError, EngineError
from schemas.events import Abort, EngineCall, Flush, Load, Pause, Resume, Sleep, StartProfile, StopProfile, Wake
from schemas.identity import Identity, Operation, Tag
from tests.engines import surfaces
from tests.engines.strict import App, StandIn, request_module, stand_in
from tests.engines.surfaces import Surface, read
from workers.engines.client import EngineClient
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.in_process import AsyncLLMClient
from workers.engines.vllm.server import VLLMServer

PLACE = Identity(replica=0, node_rank=0)
LATEST = {kind: versions[-1] for kind, versions in surfaces.RELEASES.items()}
SHORT = ProfilePlan(window=Window(0, 2))
WEIGHTS, CACHE = frozenset[Tag]({"weights"}), frozenset[Tag]({"kv_cache"})

Transport = Literal["http", "in_process"]

CALLS: list[tuple[Operation, EngineCall, str]] = [
    (Operation.PAUSE, Pause("abort"), "0.0.0"),
    (Operation.PAUSE, Pause("wait"), "0.0.0"),
    (Operation.PAUSE, Pause("keep"), "0.16.0"),
    (Operation.FLUSH, Flush(), "0.0.0"),
    (Operation.ABORT, Abort(), "0.0.0"),  # over HTTP from 0.26.0 on
    (Operation.SLEEP, Sleep(WEIGHTS | CACHE), "0.0.0"),
    (Operation.SLEEP, Sleep(WEIGHTS | CACHE, discard=True), "0.0.0"),
    (Operation.SLEEP, Sleep(CACHE), "0.31.0"),
    (Operation.WAKE, Wake(WEIGHTS), "0.0.0"),
    (Operation.WAKE, Wake(CACHE), "0.31.0"),
    (Operation.WAKE, Wake(WEIGHTS | CACHE), "0.0.0"),
    (Operation.LOAD, Load(7, Checkpoint("step_7"), None), "0.16.0"),
    (Operation.RESUME, Resume(), "0.0.0"),
    (Operation.PROFILE, StartProfile(ProfileSession(3, ProfilePlan()), "s3"), "0.0.0"),
    (Operation.PROFILE, StopProfile(ProfileSession(3, ProfilePlan()), "s3"), "0.0.0"),
    (Operation.PROFILE, StartProfile(ProfileSession(4, SHORT), "s4"), "0.32.0"),
    (Operation.PROFILE, StopProfile(ProfileSession(4, SHORT), "s4"), "0.0.0"),
]
"""Every call, and the first vLLM that can carry it out. Every SGLang can carry out all of them."""

_READS = {"check_health", "is_paused", "is_sleeping", "get_weight_version", "config_value", "auto_create_handle_loop"}


def releases(*kinds: surfaces.Kind) -> list[Any]:
    """Every release of these engines, as parameters (kind, version)."""
    chosen = kinds or tuple(surfaces.RELEASES)
    return [
        pytest.param(kind, version, id=f"{kind}-{version}") for kind in chosen for version in surfaces.RELEASES[kind]
    ]


@dataclass
class Attached:
    """A backend and the client under it."""

    client: EngineClient
    backend: VLLMEngine | SGLangEngine
    calls: Callable[[], list[str]]

    async def refusal(self, call: EngineCall) -> str:
        """Perform a call. Returns why the backend or the engine refused it; empty if it was carried out."""
        try:
            await self.backend.perform(call, 1.0)
        except (EngineError, CheckpointError) as error:
            return str(error)
        return ""


@dataclass
class OverHTTP(Attached):
    """A backend and the server that it calls."""

    app: App


@dataclass
class InProcess(Attached):
    """A backend and the object that it calls."""

    standin: StandIn

    def arguments(self, method: str) -> list[dict[str, Any]]:
        """The arguments of every call of a method, in order."""
        return [call.arguments for call in self.standin.calls if call.method == method]


def save_tensor(directory: Path) -> Path:
    """Write a checkpoint that holds a single number."""
    directory.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return directory


def attached(
    transport: Transport, kind: surfaces.Kind, version: str, folder: Path
) -> AbstractAsyncContextManager[OverHTTP | InProcess]:
    """The backend, attached to an engine of this release that was launched with everything it needs."""
    return over_http(kind, version, folder) if transport == "http" else in_process(kind, version, folder)


@asynccontextmanager
async def over_http(kind: surfaces.Kind, version: str, folder: Path) -> AsyncIterator[OverHTTP]:
    app = App(read(kind, version), (_sglang_answers if kind == "sglang" else _vllm_answers)(version, folder))
    client = SGLangServer("http://engine") if kind == "sglang" else VLLMServer("http://engine")
    client._pool = app  # type: ignore[assignment]  # the same client, with another way to the server
    backend = await _opened(kind, client, folder)
    yield OverHTTP(client, backend, lambda: [request.path for request in app.requests], app)
    await backend.close()


@asynccontextmanager
async def in_process(kind: surfaces.Kind, version: str, folder: Path) -> AsyncIterator[InProcess]:
    surface = read(kind, version)
    standin = (_tokenizer_manager if kind == "sglang" else _async_llm)(surface, folder)
    make = TokenizerManagerClient if kind == "sglang" else AsyncLLMClient
    client = make(standin.engine, request_module(surface))
    backend = await _opened(kind, client, folder)
    yield InProcess(
        client, backend, lambda: [call.method for call in standin.calls if call.method not in _READS], standin
    )
    await backend.close()


async def _opened(kind: surfaces.Kind, client: EngineClient, folder: Path) -> VLLMEngine | SGLangEngine:
    (folder / "traces" / "engine").mkdir(parents=True)
    for name in ("launched", "step_7"):
        save_tensor(folder / "checkpoints" / name)
    make = SGLangEngine if kind == "sglang" else VLLMEngine
    backend = make(PLACE, client, checkpoints=folder / "checkpoints", traces=folder / "traces")
    await backend.open()
    return backend


def _sglang_launch(folder: Path) -> dict[str, Any]:
    model = str(folder / "checkpoints" / "launched")
    memory = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return {"model_path": model, "random_seed": 7, **memory}


def _sglang_answers(version: str, folder: Path) -> dict[str, Any]:
    info = {"version": version, **_sglang_launch(folder)}
    ranks = [{"checksums": {"w": "a"}}, {"checksums": {"w": "b"}}]
    return {"/server_info": info, "/model_info": {"weight_version": "default"}, "/weights_checker": {"ranks": ranks}}


def _tokenizer_manager(surface: Surface, folder: Path) -> StandIn:
    answers: dict[str, Any] = {
        "update_weights_from_disk": (True, "Succeeded.", 0),
        "init_weights_update_group": (True, ""),
        "begin_weight_update": (True, ""),
        "update_weights_from_distributed": (True, ""),
        "end_weight_update": (True, ""),
        "check_weights": (True, "", [{"checksums": {"w": "a"}}, {"checksums": {"w": "b"}}], "c"),
        "flush_cache": SimpleNamespace(success=True),
        "config_value": "default",
    }
    arguments = SimpleNamespace(**_sglang_launch(folder), node_rank=0, device="cuda", weight_version="default")
    known = {name: answer for name, answer in answers.items() if name in surface.methods}
    state: dict[str, Any] = {"server_args": arguments, "is_pause": False, "gracefully_exit": False, "event_loop": None}
    return stand_in(surface, known, **state)


@dataclass
class _Profiler:
    """vLLM's profiler configuration, as far as the backend reads it."""

    profiler: str
    torch_profiler_dir: str


def _paused_after_wake(version: str) -> bool:
    """A wake lifts a pause from 0.17 on."""
    return surfaces.number(version) < (0, 17)


def _vllm_answers(version: str, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {
        "instance_id": "1795247545423560932",
        "model_config": {"model": str(folder / "checkpoints" / "launched"), "enable_sleep_mode": True},
        "profiler_config": {"profiler": "torch", "torch_profiler_dir": str(folder / "traces" / "engine")},
    }
    return {
        "/server_info": {"vllm_config": config},
        "/version": {"version": version},
        "/is_paused": {"is_paused": _paused_after_wake(version)},
        "/is_sleeping": {"is_sleeping": False},
        "/reset_prefix_cache": {"success": True},
        "/weight_info": {"weight_version": "default"},
        "/weight_checker": {"checksums": {"tp0:w": "a", "tp1:w": "b"}},
    }


def _async_llm(surface: Surface, folder: Path) -> StandIn:
    answers: dict[str, Any] = {
        "is_paused": _paused_after_wake(surface.version),
        "is_sleeping": False,
        "reset_prefix_cache": True,
        "get_weight_version": "default",
        "compute_weight_checksums": [{"tp0:w": "a"}, {"tp1:w": "b"}],
    }
    config = SimpleNamespace(
        instance_id="1795247545423560932",
        profiler_config=_Profiler("torch", str(folder / "traces" / "engine")),
        model_config=SimpleNamespace(model=str(folder / "checkpoints" / "launched"), enable_sleep_mode=True),
        device_config=SimpleNamespace(device="cuda"),
    )
    tracked = SimpleNamespace(request_states={"one": None, "0_two": None}, parent_requests={"two": None})
    known = {name: answer for name, answer in answers.items() if name in surface.methods}
    return stand_in(surface, known, vllm_config=config, output_processor=tracked, output_handler=None)
