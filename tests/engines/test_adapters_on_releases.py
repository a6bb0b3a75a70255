"""The adapters against every release that is read: they send nothing that the release would ignore, refuse or lack.

The server is a stand-in made from the release's own source, and stricter than the real one: an unknown parameter is an
error. What an adapter can't do with a release it says itself, before it sends anything that would not be taken.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from schemas.commands import Checkpoint, ProfilePlan, Window
from schemas.desired import ProfileSession
from schemas.errors import EngineError
from schemas.events import Abort, EngineCall, Flush, Load, Pause, Resume, Sleep, StartProfile, StopProfile, Wake
from schemas.identity import Identity, Operation, Tag
from tests.engines import wheels
from tests.engines.release_facts import number
from tests.engines.strict import Answer, App, strict_app
from tests.engines.surfaces import read
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.server import VLLMServer

pytestmark = [pytest.mark.engine_wheels, pytest.mark.timeout(600), pytest.mark.anyio, pytest.mark.one_loop]

RELEASES = [
    pytest.param(kind, version, id=f"{kind}-{version}")
    for kind, versions in wheels.RELEASES.items()
    for version in versions
]
PRIMARY = Identity(replica=0, node_rank=0, nnodes=1)


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    """All wheels, several at a time: one by one they take minutes."""
    wheels.fetch_all()


class Bench(NamedTuple):
    """An adapter and the server that it speaks to."""

    engine: SGLangEngine | VLLMEngine
    app: App

    async def said(self, call: EngineCall) -> str:
        """What the adapter says of a call that it does not make; empty for one that it made."""
        try:
            await self.engine.perform(call, 1.0)
        except EngineError as error:
            return str(error)
        return ""


def save_tensor(directory: Path) -> Path:
    """A checkpoint of one number."""
    directory.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return directory


def told(kind: wheels.Kind, version: str, model: Path, traces: Path) -> dict[str, Answer]:
    """What a server says of itself."""
    if kind == "sglang":
        info = {"version": version, "model_path": str(model), "random_seed": 7, "enable_memory_saver": True}
        return {
            "/server_info": {**info, "enable_weights_cpu_backup": True},
            "/model_info": {"weight_version": "default"},
        }
    config: dict[str, Any] = {
        "instance_id": "1795247545423560932",
        "model_config": {"model": str(model), "enable_sleep_mode": True},
        "profiler_config": {"profiler": "torch", "torch_profiler_dir": str(traces / "engine")},
    }
    return {
        "/server_info": {"vllm_config": config},
        "/version": {"version": version},
        "/is_paused": {"is_paused": number(version) < (0, 17)},  # after a wake, which lifts a pause from 0.17 on
        "/is_sleeping": {"is_sleeping": False},
        "/reset_prefix_cache": {"success": True},
        "/weight_info": {"weight_version": "default"},
    }


@asynccontextmanager
async def attached(kind: wheels.Kind, version: str, folder: Path) -> AsyncIterator[Bench]:
    """The adapter of `kind` on a server of this release."""
    traces = folder / "traces"
    (traces / "engine").mkdir(parents=True)
    model = save_tensor(folder / "checkpoints" / "launched")
    save_tensor(folder / "checkpoints" / "step_7")
    app = strict_app(read(kind, version), told(kind, version, model, traces))
    front = SGLangServer("http://engine") if kind == "sglang" else VLLMServer("http://engine")
    await front._client.aclose()  # the same client, but for the way to the server
    front._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=front.where)
    adapter = SGLangEngine if kind == "sglang" else VLLMEngine
    engine = adapter(PRIMARY, front, checkpoints=folder / "checkpoints", traces=traces)
    await engine.open()
    yield Bench(engine, app)
    await engine.close()


PLAN, SHORT = ProfilePlan(), ProfilePlan(window=Window(0, 2))
WEIGHTS, CACHE, BOTH = (
    frozenset[Tag]({"weights"}),
    frozenset[Tag]({"kv_cache"}),
    frozenset[Tag]({"weights", "kv_cache"}),
)

CALLS: list[tuple[Operation, EngineCall, str]] = [
    (Operation.PAUSE, Pause("abort"), "0.0.0"),
    (Operation.PAUSE, Pause("wait"), "0.0.0"),
    (Operation.PAUSE, Pause("keep"), "0.16.0"),
    (Operation.FLUSH, Flush(), "0.0.0"),
    (Operation.ABORT, Abort(), "0.26.0"),
    (Operation.SLEEP, Sleep(BOTH), "0.0.0"),
    (Operation.SLEEP, Sleep(BOTH, discard=True), "0.0.0"),
    (Operation.SLEEP, Sleep(CACHE), "0.31.0"),
    (Operation.WAKE, Wake(WEIGHTS), "0.0.0"),
    (Operation.WAKE, Wake(CACHE), "0.31.0"),
    (Operation.WAKE, Wake(BOTH), "0.0.0"),
    (Operation.LOAD, Load(7, Checkpoint("step_7"), None), "0.16.0"),
    (Operation.RESUME, Resume(), "0.0.0"),
    (Operation.PROFILE, StartProfile(ProfileSession(3, PLAN), "s3"), "0.0.0"),
    (Operation.PROFILE, StopProfile(ProfileSession(3, PLAN), "s3"), "0.0.0"),
    (Operation.PROFILE, StartProfile(ProfileSession(4, SHORT), "s4"), "0.32.0"),
    (Operation.PROFILE, StopProfile(ProfileSession(4, SHORT), "s4"), "0.0.0"),
]
"""What is called, and the first vLLM that can do it. Every SGLang can do all of it."""

IGNORED = "POST /sleep: has no query parameter mode"
"""Of vLLM before 0.17: a real server passes over it, as is meant. None may be told anything else that it lacks."""


@pytest.mark.parametrize(("kind", "version"), RELEASES)
async def test_what_an_adapter_sends_is_taken(kind: wheels.Kind, version: str, tmp_path: Path) -> None:
    async with attached(kind, version, tmp_path) as bench:
        seen = await bench.engine.observe()
        assert seen.tokenizer == "present" and seen.instance is not None
        ignores = kind == "vllm" and number(version) < (0, 17)
        for operation, call, since in CALLS:
            before = len(bench.app.asked)
            said = await bench.said(call) if operation in seen.operations else f"it can't {operation}"
            said = "" if ignores and IGNORED in said else said
            sent = [one.path for one in bench.app.asked[before:]]
            can = kind == "sglang" or number(since) <= number(version)
            if not can and call == Wake(CACHE):  # it woke with the weights
                assert (sent, said) == ([], "")
                continue
            assert (bool(sent), said == "") == (can, can), f"{call}: sent {sent}, said {said!r}"
        refused = [one for one in bench.app.asked if one.status != 200 and not (ignores and one.path == "/sleep")]
        assert refused == []
