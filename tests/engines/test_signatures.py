"""The adapters in process against every release that is read: each call fits the release's own signatures and classes.

The objects are stand-ins made from the release's source; one that is called as it can't be raises what Python raises.
What a release can't do the adapter says itself, and calls nothing.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import pytest
import trio

from schemas.commands import Broadcast, Checkpoint, ProfilePlan, Window
from schemas.desired import ProfileSession
from schemas.errors import CheckpointError, EngineError
from schemas.events import (
    Abort,
    CheckSource,
    EngineCall,
    Flush,
    Load,
    Pause,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Identity, Operation, Tag
from schemas.safetensors.manifest import build_manifest
from tests.engines import wheels
from tests.engines.release_facts import number
from tests.engines.strict import Answer, StandIn, request_module, strict_async_llm, strict_tokenizer_manager
from tests.engines.surfaces import Surface, read
from workers.engines.client import CallRefused, Unanswered
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient
from workers.engines.vllm.engine import VLLMEngine, fingerprint
from workers.engines.vllm.in_process import AsyncLLMClient

pytestmark = [pytest.mark.engine_wheels, pytest.mark.timeout(600), pytest.mark.anyio, pytest.mark.one_loop]

PLACE = Identity(replica=0, node_rank=0)
PLAN, SHORT = ProfilePlan(), ProfilePlan(window=Window(0, 2))
WEIGHTS, CACHE = frozenset[Tag]({"weights"}), frozenset[Tag]({"kv_cache"})
LATEST = {kind: versions[-1] for kind, versions in wheels.RELEASES.items()}


def releases(*kinds: wheels.Kind) -> list[Any]:
    return [pytest.param(kind, version, id=f"{kind}-{version}") for kind in kinds for version in wheels.RELEASES[kind]]


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    """All wheels, several at a time: one by one they take minutes."""
    wheels.fetch_all()


class Bench(NamedTuple):
    """An adapter over an engine in process."""

    front: AsyncLLMClient | TokenizerManagerClient
    adapter: VLLMEngine | SGLangEngine
    standin: StandIn

    async def said(self, call: EngineCall) -> str:
        """What the adapter says of a call that it does not make; empty for one that it made."""
        try:
            await self.adapter.perform(call, 1.0)
        except (EngineError, CheckpointError) as error:
            return str(error)
        return ""

    def arguments(self, method: str) -> list[dict[str, Any]]:
        """Of every call of the method, in order."""
        return [one.arguments for one in self.standin.calls if one.method == method]


@dataclass
class Profiler:
    """vLLM's, as far as the adapter looks at it."""

    profiler: str
    torch_profiler_dir: str


def save_tensor(directory: Path) -> Path:
    """A checkpoint of one number."""
    directory.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return directory


def vllm_standin(surface: Surface, folder: Path) -> StandIn:
    """An AsyncLLM that was launched with all that is needed, and tracks two requests."""
    said: dict[str, Answer] = {
        "is_paused": number(surface.version) < (0, 17),  # after a wake, which lifts a pause from 0.17 on
        "is_sleeping": False,
        "reset_prefix_cache": True,
        "get_weight_version": "default",
        "compute_weight_checksums": [{"tp0:w": "a"}, {"tp1:w": "b"}],
    }
    config = SimpleNamespace(
        instance_id="1795247545423560932",
        profiler_config=Profiler("torch", str(folder / "traces" / "engine")),
        model_config=SimpleNamespace(model=str(folder / "checkpoints" / "launched"), enable_sleep_mode=True),
        device_config=SimpleNamespace(device="cuda"),
    )
    tracked = SimpleNamespace(request_states={"one": None, "0_two": None}, parent_requests={"two": None})
    known = {name: answer for name, answer in said.items() if name in surface.methods}
    return strict_async_llm(surface, known, vllm_config=config, output_processor=tracked, output_handler=None)


def sglang_standin(surface: Surface, folder: Path) -> StandIn:
    """A TokenizerManager that was launched with all that is needed."""
    said: dict[str, Answer] = {
        "update_weights_from_disk": (True, "Succeeded.", 0),
        "init_weights_update_group": (True, ""),
        "begin_weight_update": (True, ""),
        "update_weights_from_distributed": (True, ""),
        "end_weight_update": (True, ""),
        "flush_cache": SimpleNamespace(success=True),
        "config_value": "default",
    }
    arguments = SimpleNamespace(
        random_seed=7,
        node_rank=0,
        device="cuda",
        model_path=str(folder / "checkpoints" / "launched"),
        enable_memory_saver=True,
        enable_weights_cpu_backup=True,
        weight_version="default",
    )
    known = {name: answer for name, answer in said.items() if name in surface.methods}
    state: dict[str, Any] = {"server_args": arguments, "is_pause": False, "gracefully_exit": False, "event_loop": None}
    return strict_tokenizer_manager(surface, known, **state)


@asynccontextmanager
async def attached(kind: wheels.Kind, version: str, folder: Path) -> AsyncIterator[Bench]:
    """The adapter on an engine of this release."""
    surface = read(kind, version)
    places = {"checkpoints": folder / "checkpoints", "traces": folder / "traces"}
    (folder / "traces" / "engine").mkdir(parents=True)
    for name in ("launched", "step_7"):
        save_tensor(folder / "checkpoints" / name)
    if kind == "vllm":
        standin = vllm_standin(surface, folder)
        llm = AsyncLLMClient(standin.engine, request_module(surface))
        bench = Bench(llm, VLLMEngine(PLACE, llm, **places), standin)
    else:
        standin = sglang_standin(surface, folder)
        manager = TokenizerManagerClient(standin.engine, request_module(surface))
        bench = Bench(manager, SGLangEngine(PLACE, manager, **places), standin)
    await bench.adapter.open()
    yield bench
    await bench.adapter.close()


CALLS: list[tuple[Operation, EngineCall, str]] = [
    (Operation.PAUSE, Pause("abort"), "0.0.0"),
    (Operation.PAUSE, Pause("wait"), "0.0.0"),
    (Operation.PAUSE, Pause("keep"), "0.16.0"),
    (Operation.FLUSH, Flush(), "0.0.0"),
    (Operation.ABORT, Abort(), "0.0.0"),
    (Operation.SLEEP, Sleep(WEIGHTS | CACHE), "0.0.0"),
    (Operation.SLEEP, Sleep(WEIGHTS | CACHE, discard=True), "0.0.0"),
    (Operation.SLEEP, Sleep(CACHE), "0.31.0"),
    (Operation.WAKE, Wake(WEIGHTS), "0.0.0"),
    (Operation.WAKE, Wake(WEIGHTS | CACHE), "0.0.0"),
    (Operation.LOAD, Load(7, Checkpoint("step_7"), None), "0.16.0"),
    (Operation.RESUME, Resume(), "0.0.0"),
    (Operation.PROFILE, StartProfile(ProfileSession(3, PLAN), "s3"), "0.0.0"),
    (Operation.PROFILE, StopProfile(ProfileSession(3, PLAN), "s3"), "0.0.0"),
    (Operation.PROFILE, StartProfile(ProfileSession(4, SHORT), "s4"), "0.32.0"),
    (Operation.PROFILE, StopProfile(ProfileSession(4, SHORT), "s4"), "0.0.0"),
]
"""What is called, and the first vLLM that can do it in process. Every SGLang can do all of it."""

LABELS = {"update_weight_version", "compute_weight_checksums"}
ASIDE = {"check_health", "is_paused", "is_sleeping", "get_weight_version", "config_value", "auto_create_handle_loop"}
"""Calls that change nothing."""


@pytest.mark.parametrize(("kind", "version"), releases("sglang", "vllm"))
async def test_every_call_fits_the_release(kind: wheels.Kind, version: str, tmp_path: Path) -> None:
    async with attached(kind, version, tmp_path) as bench:
        seen = await bench.adapter.observe()
        assert seen.tokenizer == "present" and seen.instance is not None
        assert seen.generating is (kind == "sglang" or number(version) >= (0, 17))
        for operation, call, since in CALLS:
            before = len(bench.standin.calls)
            said = await bench.said(call) if operation in seen.operations else f"it can't {operation}"
            made = [one.method for one in bench.standin.calls[before:] if one.method not in ASIDE]
            can = kind == "sglang" or number(since) <= number(version)
            assert (bool(made), said == "") == (can, can), f"{call}: made {made}, said {said!r}"


@pytest.mark.parametrize(("kind", "version"), releases("sglang"))
async def test_sglang_is_asked_in_the_words_of_the_release(kind: wheels.Kind, version: str, tmp_path: Path) -> None:
    async with attached(kind, version, tmp_path) as bench:
        assert await bench.said(StartProfile(ProfileSession(4, SHORT), "s4")) == ""
        armed, started = bench.arguments("start_profile")
        of_request = set(started) == {"req"}
        assert of_request == (number(version) >= (0, 5, 15))
        names = ("output_dir", "activities", "start_step")
        never, words = (
            {name: getattr(one["req"], name) for name in names} if of_request else one for one in (armed, started)
        )
        assert (never["start_step"], never["activities"]) == (1 << 60, [])  # tells whether a session is open
        assert words["output_dir"] == str(tmp_path / "traces" / "s4") and words["activities"] == ["CPU"]

        assert await bench.said(Load(7, Checkpoint("step_7"), None)) == ""
        (loaded,) = bench.arguments("update_weights_from_disk")
        assert loaded["obj"].model_path.endswith("/step_7") and loaded["obj"].flush_cache is False
        assert bench.arguments("abort_request") == []  # though a new label asks for it by default
        if "update_weight_version" in bench.standin.engine.__class__.__dict__:
            assert [one["obj"].new_version for one in bench.arguments("update_weight_version")] == ["7"]
        else:
            assert (await bench.adapter.observe()).version == 7

        before = len(bench.standin.calls)
        assert await bench.said(Flush()) == ""
        assert [one.method for one in bench.standin.calls[before:]] == ["auto_create_handle_loop", "flush_cache"]


@pytest.mark.parametrize(("kind", "version"), releases("vllm"))
async def test_vllm_is_asked_in_the_words_of_the_release(kind: wheels.Kind, version: str, tmp_path: Path) -> None:
    new = number(version) >= (0, 16)
    async with attached(kind, version, tmp_path) as bench:
        assert await bench.said(Pause("wait")) == ""
        words = {"mode": "wait"} if new else {"wait_for_inflight_requests": True}
        assert bench.arguments("pause_generation") == [{**words, "clear_cache": False}]

        assert await bench.said(Abort()) == ""
        ids = {"request_id": ["one", "0_two", "two"]}  # a request for two samples and its children, by their own ids
        assert bench.arguments("abort") == [{**ids, "internal": True} if number(version) >= (0, 14) else ids]

        if "compute_weight_checksums" in (await bench.front.methods() or {}):
            manifest = build_manifest(tmp_path / "checkpoints" / "step_7", content=True)
            returned = await bench.adapter.perform(Load(7, Checkpoint("step_7"), manifest), 1.0)
            assert returned.digest == fingerprint({"tp0:w": "a", "tp1:w": "b"})  # of all workers, as over HTTP


@pytest.mark.parametrize(("kind", "version"), releases("sglang", "vllm"))
async def test_a_broadcast_is_received_as_the_release_does_it(kind: wheels.Kind, version: str, tmp_path: Path) -> None:
    manifest = build_manifest(save_tensor(tmp_path / "sent"), content=False)
    source = Broadcast(host="10.0.0.1", port=29500, group="g", replicas=(0, 1))
    async with attached(kind, version, tmp_path) as bench:
        can = kind == "sglang" or number(version) >= (0, 16)
        assert (await bench.said(CheckSource(source, manifest, 7)) == "") == can
        if not can:
            return
        before = len(bench.standin.calls)
        assert await bench.said(Load(7, source, manifest)) == ""
        assert await bench.said(Load(8, source, manifest)) == ""  # the group is made once
        made = [one.method for one in bench.standin.calls[before:] if one.method not in ASIDE | LABELS]
        session = {"sglang": (0, 5, 21), "vllm": (0, 21)}[kind] <= number(version)
        update = {
            "sglang": ["begin_weight_update", "update_weights_from_distributed", "end_weight_update"],
            "vllm": ["start_weight_update", "update_weights", "finish_weight_update"],
        }[kind]
        group = {"sglang": "init_weights_update_group", "vllm": "init_weight_transfer_engine"}[kind]
        assert made == [group, *2 * (update if session else update[1:2])]


@pytest.mark.parametrize(("kind", "version"), releases("vllm"))
async def test_weight_transfer_takes_the_request_classes(kind: wheels.Kind, version: str, tmp_path: Path) -> None:
    async with attached(kind, version, tmp_path) as bench:
        methods = await bench.front.methods()
        assert methods is not None
        if number(version) < (0, 16):
            assert "update_weights" not in methods
            return
        await bench.front.call("init_weight_transfer_engine", init_info={"rank_offset": 1})
        await bench.front.call("update_weights", update_info={"names": ["w"]})
        assert bench.arguments("init_weight_transfer_engine")[0]["request"].init_info == {"rank_offset": 1}
        assert bench.arguments("update_weights")[0]["request"].update_info == {"names": ["w"]}


# --- what an engine answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [(False, "no such file", 0), SimpleNamespace(success=False, message="no such file")])
async def test_an_answer_of_no_is_refused_in_its_words(answer: object, tmp_path: Path) -> None:
    async with attached("sglang", LATEST["sglang"], tmp_path) as bench:
        bench.standin.answers["update_weights_from_disk"] = answer
        with pytest.raises(CallRefused, match="answered no: no such file"):
            await bench.front.call("update_weights_from_disk", model_path="/nowhere")


async def test_a_field_that_the_release_lacks_is_refused_and_nothing_is_called(tmp_path: Path) -> None:
    async with attached("sglang", "0.5.9", tmp_path) as bench:
        with pytest.raises(CallRefused, match="torch_empty_cache"):
            await bench.front.call("continue_generation", torch_empty_cache=False)
        assert bench.arguments("continue_generation") == []


async def test_what_an_engine_raises_is_refused_while_it_lives_and_unanswered_when_it_is_dead(tmp_path: Path) -> None:
    async with attached("vllm", LATEST["vllm"], tmp_path) as bench:
        bench.standin.answers["resume_generation"] = ValueError("not now")
        with pytest.raises(CallRefused, match="ValueError: not now"):
            await bench.front.call("resume_generation")
        bench.standin.answers["check_health"] = RuntimeError("core died")
        with pytest.raises(Unanswered, match="core died"):
            await bench.front.call("resume_generation")
        with pytest.raises(Unanswered, match="core died"):
            await bench.front.read("is_paused")
        assert await bench.front.methods() is None
        assert (await bench.adapter.observe()).tokenizer == "unknown"


async def test_a_call_ends_when_its_engine_dies_though_nobody_answers_it(tmp_path: Path) -> None:
    async with attached("vllm", LATEST["vllm"], tmp_path) as bench:

        async def die() -> None:
            bench.standin.answers["check_health"] = RuntimeError("core died")
            await anyio.sleep_forever()

        bench.standin.answers["resume_generation"] = die
        with pytest.raises(Unanswered, match="core died"):
            await bench.front.call("resume_generation")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_call_goes_on_when_its_caller_is_cancelled(kind: wheels.Kind, tmp_path: Path) -> None:
    began, may_end, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def take_long(**_: object) -> None:
        began.set()
        await may_end.wait()
        ended.set()

    async with attached(kind, LATEST[kind], tmp_path) as bench:
        bench.standin.answers["stop_profile"] = take_long
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.front.call, "stop_profile")
            await began.wait()
            tasks.cancel_scope.cancel()
            may_end.set()
        assert ended.is_set()


# --- where there is nothing to call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("manager", [None, SimpleNamespace(recv_from_detokenizer=None)])
async def test_a_node_without_control_has_no_tokenizer(manager: object, tmp_path: Path) -> None:
    front = TokenizerManagerClient(manager)
    engine = SGLangEngine(PLACE, front, checkpoints=tmp_path, traces=tmp_path)
    await engine.open()
    assert (await engine.observe()).tokenizer == "absent"
    with pytest.raises(EngineError, match="not called"):
        await engine.perform(Resume(), 1.0)


async def test_an_engine_that_is_shut_down_is_gone(tmp_path: Path) -> None:
    async with attached("sglang", LATEST["sglang"], tmp_path) as bench:
        assert (await bench.adapter.observe()).tokenizer == "present"
        bench.standin.engine.gracefully_exit = True
        assert (await bench.adapter.observe()).tokenizer == "unknown"
        with pytest.raises(Unanswered):
            await bench.front.call("continue_generation")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_two_engines_of_one_process_are_told_apart(kind: wheels.Kind, tmp_path: Path) -> None:
    async with (
        attached(kind, LATEST[kind], tmp_path / "a") as one,
        attached(kind, LATEST[kind], tmp_path / "b") as other,
    ):
        seen = {(await bench.adapter.observe()).instance for bench in (one, one, other)}
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_agent_under_trio_is_told_where_to_run(kind: wheels.Kind, tmp_path: Path) -> None:
    async def enter() -> None:
        async with attached(kind, LATEST[kind], tmp_path):
            pass

    with pytest.raises(EngineError, match="belongs to an asyncio event loop.*Run the agent as a task"):
        trio.run(enter)
