"""The backends in process against every release that is read: calls fit the release's own signatures and classes.

The objects are stand-ins made from the release's source; a call that does not fit raises what Python raises.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
import trio
from msgspec.structs import replace

from schemas.commands import Broadcast, Checkpoint
from schemas.desired import ProfileSession
from schemas.errors import CheckpointError, EngineError, RefusedError, UnansweredError
from schemas.events import Abort, CheckSource, Flush, Load, Pause, Resume, StartProfile
from schemas.identity import Digests, Operation
from schemas.safetensors.manifest import build_manifest
from schemas.wire import PeerFound
from tests.engines import surfaces
from tests.engines.releases import LATEST, PLACE, SHORT, Transport, attached, in_process, releases, save_tensor
from workers.engines.client import CallRefused
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

LABELS = {"update_weight_version", "compute_weight_checksums"}
BROADCAST = Broadcast(host="10.0.0.1", port=29500, group="g", replicas=(0, 1))
UPDATES = {
    "sglang": ("begin_weight_update", "update_weights_from_distributed", "end_weight_update"),
    "vllm": ("start_weight_update", "update_weights", "finish_weight_update"),
}


@pytest.mark.parametrize(("kind", "version"), releases("sglang"))
async def test_calls_of_sglang_fit_the_release(kind: surfaces.Kind, version: str, tmp_path: Path) -> None:
    async with in_process(kind, version, tmp_path) as bench:
        assert await bench.refusal(StartProfile(ProfileSession(4, SHORT), "s4")) == ""
        armed, started = bench.arguments("start_profile")
        of_request = set(started) == {"req"}
        assert of_request == (surfaces.number(version) >= (0, 5, 15))
        names = ("output_dir", "activities", "start_step")
        never, words = (
            {name: getattr(entry["req"], name) for name in names} if of_request else entry for entry in (armed, started)
        )
        assert (never["start_step"], never["activities"]) == (1 << 60, [])  # tells whether a session is open
        assert words["output_dir"] == str(tmp_path / "traces" / "s4") and words["activities"] == ["CPU"]

        assert await bench.refusal(Load(7, Checkpoint("step_7"), None)) == ""
        (loaded,) = bench.arguments("update_weights_from_disk")
        assert loaded["obj"].model_path.endswith("/step_7") and loaded["obj"].flush_cache is False
        assert bench.arguments("abort_request") == []  # though a new label asks for it by default
        if "update_weight_version" in bench.standin.engine.__class__.__dict__:
            assert [argument["obj"].new_version for argument in bench.arguments("update_weight_version")] == ["7"]
        else:
            assert (await bench.backend.observe()).version == 7

        before = len(bench.standin.calls)
        assert await bench.refusal(Flush()) == ""
        assert [call.method for call in bench.standin.calls[before:]] == ["auto_create_handle_loop", "flush_cache"]


@pytest.mark.parametrize(("kind", "version"), releases("vllm"))
async def test_calls_of_vllm_fit_the_release(kind: surfaces.Kind, version: str, tmp_path: Path) -> None:
    new = surfaces.number(version) >= (0, 16)
    async with in_process(kind, version, tmp_path) as bench:
        assert await bench.refusal(Pause("wait")) == ""
        words = {"mode": "wait"} if new else {"wait_for_inflight_requests": True}
        assert bench.arguments("pause_generation") == [{**words, "clear_cache": False}]

        assert await bench.refusal(Abort()) == ""
        ids = {"request_id": ["one", "0_two", "two"]}  # a request for two samples and its children, by their own ids
        assert bench.arguments("abort") == [{**ids, "internal": True} if surfaces.number(version) >= (0, 14) else ids]


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("digests", ["always", "announced", "never"])
@pytest.mark.parametrize("transport", ["http", "in_process"])
@pytest.mark.parametrize(("kind", "version"), releases())
async def test_checksums_are_read_after_the_loads_that_are_to_be_proven_where_the_release_has_them(
    transport: Transport, kind: surfaces.Kind, version: str, digests: Digests, content: bool, tmp_path: Path
) -> None:
    since = (0, 5, 15) if kind == "sglang" else (0, 32)
    asked = digests == "always" or (digests == "announced" and content)
    async with attached(transport, kind, version, tmp_path) as bench:
        if Operation.LOAD not in (await bench.backend.observe()).operations:
            return
        bench.backend._digests = digests
        manifest = build_manifest(tmp_path / "checkpoints" / "step_7", content=content)
        digest = (await bench.backend.perform(Load(7, Checkpoint("step_7"), manifest), 1.0)).digest
        assert (digest is not None) == (asked and surfaces.number(version) >= since)
        assert digest is None or re.fullmatch(rf"{kind}:[0-9a-f]{{16}}:[0-9a-f]{{64}}", digest)


async def test_what_a_launch_has_copied_is_neither_read_nor_loaded(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with in_process("sglang", LATEST["sglang"], tmp_path) as bench:
        manifest = build_manifest(root / "step_7", content=True)
        calls = CheckSource(Checkpoint("step_7"), manifest, 7), Load(7, Checkpoint("step_7"), manifest)
        held = (await bench.backend.perform(calls[1], 1.0)).digest
        root.rename(tmp_path / "away")
        found = PeerFound(url="http://peer:1", content=manifest.content or "", digest=held or "")
        copied, other = (
            SGLangEngine(PLACE, bench.client, checkpoints=root, traces=tmp_path, copied=each)
            for each in (found, replace(found, digest="other"))
        )
        assert [(await copied.perform(call, 1.0)).digest for call in calls] == [None, held]
        assert len(bench.arguments("update_weights_from_disk")) == 1
        for call in calls:
            with pytest.raises(CheckpointError):
                await other.perform(call, 1.0)


@pytest.mark.parametrize(("kind", "version"), releases("sglang", "vllm"))
async def test_a_broadcast_is_received_as_the_release_does_it(
    kind: surfaces.Kind, version: str, tmp_path: Path
) -> None:
    manifest = build_manifest(save_tensor(tmp_path / "sent"), content=False)
    async with in_process(kind, version, tmp_path) as bench:
        can = kind == "sglang" or surfaces.number(version) >= (0, 16)
        assert (await bench.refusal(CheckSource(BROADCAST, manifest, 7)) == "") == can
        if not can:
            assert "update_weights" not in (await bench.client.methods() or {})
            return
        before = len(bench.calls())
        assert await bench.refusal(Load(7, BROADCAST, manifest)) == ""
        assert await bench.refusal(Load(8, BROADCAST, manifest)) == ""  # the group is made once
        made = [method for method in bench.calls()[before:] if method not in LABELS]
        session = {"sglang": (0, 5, 21), "vllm": (0, 21)}[kind] <= surfaces.number(version)
        update = [*UPDATES[kind]]
        group = {"sglang": "init_weights_update_group", "vllm": "init_weight_transfer_engine"}[kind]
        assert made == [group, *2 * (update if session else update[1:2])]
        if kind == "vllm":  # wrapped in the release's own classes
            assert bench.arguments(group)[0]["request"].init_info["rank_offset"] == 1
            assert bench.arguments("update_weights")[0]["request"].update_info["names"] == ["w"]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_update_that_fails_is_finished(kind: surfaces.Kind, tmp_path: Path) -> None:
    begin, update, end = UPDATES[kind]
    load = Load(7, BROADCAST, build_manifest(save_tensor(tmp_path / "sent"), content=False))
    async with in_process(kind, LATEST[kind], tmp_path) as bench:
        bench.standin.answers[update] = RuntimeError("the sender went away")
        assert await bench.refusal(load)
        assert [method for method in bench.calls() if method in UPDATES[kind]] == [begin, update, end]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_update_that_its_agent_left_open_is_finished_first(kind: surfaces.Kind, tmp_path: Path) -> None:
    begin, update, end = UPDATES[kind]
    load = Load(7, BROADCAST, build_manifest(save_tensor(tmp_path / "sent"), content=False))
    async with in_process(kind, LATEST[kind], tmp_path) as bench:
        begun: list[None] = []

        async def once(**_: object) -> None:
            begun.append(None)
            if len(begun) == 1:
                raise RuntimeError("a weight update is already active")

        bench.standin.answers[begin] = once
        assert await bench.refusal(load) == ""
        assert [method for method in bench.calls() if method in UPDATES[kind]] == [begin, end, begin, update, end]


# --- what an engine answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [(False, "no such file", 0), SimpleNamespace(success=False, message="no such file")])
async def test_a_negative_answer_is_a_refusal_that_quotes_it(answer: object, tmp_path: Path) -> None:
    async with in_process("sglang", LATEST["sglang"], tmp_path) as bench:
        bench.standin.answers["update_weights_from_disk"] = answer
        with pytest.raises(CallRefused, match="answered no: no such file"):
            await bench.client.call("update_weights_from_disk", model_path="/nowhere")


async def test_a_field_that_the_release_lacks_is_refused_and_nothing_is_called(tmp_path: Path) -> None:
    async with in_process("sglang", "0.5.9", tmp_path) as bench:
        with pytest.raises(CallRefused, match="torch_empty_cache"):
            await bench.client.call("continue_generation", torch_empty_cache=False)
        assert bench.arguments("continue_generation") == []


async def test_an_error_is_an_answer_of_a_live_engine_and_a_dead_one_is_not_called(tmp_path: Path) -> None:
    async with in_process("vllm", LATEST["vllm"], tmp_path) as bench:
        bench.standin.answers["resume_generation"] = ValueError("not now")
        with pytest.raises(CallRefused, match="ValueError: not now"):
            await bench.client.call("resume_generation")
        bench.standin.answers["check_health"] = RuntimeError("core died")
        for late in (bench.client.call("resume_generation"), bench.client.read("is_paused")):
            with pytest.raises(RefusedError, match="was not called: the engine is dead: RuntimeError.* core died"):
                await late
        assert len(bench.arguments("resume_generation")) == 1
        assert await bench.client.methods() is None
        assert (await bench.backend.observe()).tokenizer == "unknown"


async def test_a_call_ends_when_its_engine_dies_without_an_answer(tmp_path: Path) -> None:
    async with in_process("vllm", LATEST["vllm"], tmp_path) as bench:

        async def die() -> None:
            bench.standin.answers["check_health"] = RuntimeError("core died")
            await anyio.sleep_forever()

        bench.standin.answers["resume_generation"] = die
        with pytest.raises(UnansweredError, match="core died"):
            await bench.client.call("resume_generation")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_call_continues_when_its_caller_is_cancelled(kind: surfaces.Kind, tmp_path: Path) -> None:
    began, may_end, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def take_long(**_: object) -> None:
        began.set()
        await may_end.wait()
        ended.set()

    async with in_process(kind, LATEST[kind], tmp_path) as bench:
        bench.standin.answers["stop_profile"] = take_long
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.client.call, "stop_profile")
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
    async with in_process("sglang", LATEST["sglang"], tmp_path) as bench:
        assert (await bench.backend.observe()).tokenizer == "present"
        bench.standin.engine.gracefully_exit = True
        assert (await bench.backend.observe()).tokenizer == "unknown"
        with pytest.raises(RefusedError, match="was not called: the engine is being shut down"):
            await bench.client.call("continue_generation")
        assert bench.arguments("continue_generation") == []


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_two_engines_in_one_process_are_distinguished(kind: surfaces.Kind, tmp_path: Path) -> None:
    async with (
        in_process(kind, LATEST[kind], tmp_path / "a") as first,
        in_process(kind, LATEST[kind], tmp_path / "b") as second,
    ):
        seen = {(await bench.backend.observe()).instance for bench in (first, first, second)}
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_agent_under_trio_gets_advice(kind: surfaces.Kind, tmp_path: Path) -> None:
    async def enter() -> None:
        async with in_process(kind, LATEST[kind], tmp_path):
            pass

    with pytest.raises(EngineError, match="belongs to an asyncio event loop.*Run the agent as a task"):
        trio.run(enter)
