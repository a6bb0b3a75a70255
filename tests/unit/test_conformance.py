"""The acceptance kit finds each fault of a backend, and none in the backend of docs/backends.md."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import anyio
import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from safetensors.torch import save_file

from controlplane.cli.conform import conform
from schemas import events
from schemas.errors import ConfigError, EngineError, UnsupportedError
from schemas.events import (
    Abort,
    CheckSource,
    Flush,
    Load,
    Observation,
    Pause,
    Resume,
    Returned,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Identity, Operation
from tests.engines.http_servers import HttpServer
from tests.pages import blocks, module_of
from tests.running import rolloutctl
from tests.unit.broken_backends import ADAPTERS, answer, bad, bound, does, ignored, judged, then
from workers.conformance import engine_under_test
from workers.conformance.engine_under_test import EngineUnderTest, Setup
from workers.conformance.server_client import ServerClient
from workers.engine import Engine
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backend of the page, and two checkpoints of its model."""
    folder = tmp_path_factory.mktemp("echo")
    module_of("docs/backends.md", "echo", folder)
    for name, value in (("a", 1), ("b", 2)):
        (folder / "ckpt" / name).mkdir(parents=True)
        tensor = torch.full((64,), value, dtype=torch.uint8)
        save_file({"echo": tensor}, folder / "ckpt" / name / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def echo(folder: Path) -> ModuleType:
    spec = spec_from_file_location("echo", folder / "echo.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(echo: ModuleType, folder: Path) -> Any:
    engine = echo.Echo(Identity(replica=0, node_rank=0), folder / "ckpt", folder / "traces")
    engine.state = "running"
    return engine


def test_the_backend_of_the_page_conforms_on_the_command_line(folder: Path) -> None:
    ((_, *words),) = (line.split() for block in blocks("docs/backends.md", "sh") for line in block.splitlines())
    done = rolloutctl(*words, cwd=folder, env={"PYTHONPATH": f"{Path.cwd()}:{folder}"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 17 and "cancelled call" in done.stdout


def test_the_protocol_of_the_page_is_that_of_the_agent() -> None:
    names: dict[str, Any] = {**vars(events), "Protocol": Protocol}
    exec(next(block for block in blocks("docs/backends.md") if block.startswith("class Engine(Protocol)")), names)
    for method in ("open", "observe", "perform", "close"):
        assert signature(getattr(names["Engine"], method)) == signature(getattr(Engine, method))


# --- one fault at a time ----------------------------------------------------------------------------------------------


def instead(mode: str) -> Callable[[Any], Callable[[Any, Any], Awaitable[None]]]:
    """Pause in another mode than asked."""

    def bound(engine: Any) -> Callable[[Any, Any], Awaitable[None]]:
        async def way(call: Any, right: Any) -> None:
            await engine.pause(mode)

        return way

    return bound


def second_fails(engine: Any) -> Callable[[Any, Any], Awaitable[Returned]]:
    async def way(call: Any, right: Any) -> Returned:
        if engine.state == "paused":
            raise EngineError("paused already")
        return await right()  # type: ignore[no-any-return]

    return way


def gives_up(engine: Any) -> Callable[[Any, Any], Awaitable[None]]:
    """Return at the deadline, as if the requests had ended."""

    async def way(call: Any, right: Any) -> None:
        with anyio.move_on_after(0.01):
            await right()
        engine.state = "paused"

    return way


def wedges(engine: Any) -> Callable[[Any, Any], Awaitable[Returned]]:
    """Once cancelled, refuse everything."""

    async def way(call: Any, right: Any) -> Returned:
        if getattr(engine, "wedged", False):
            raise EngineError("another call is under way")
        try:
            return await right()  # type: ignore[no-any-return]
        except BaseException:
            engine.wedged = True
            raise

    return way


def sets(**values: Any) -> Callable[[Any], None]:
    return lambda engine: engine.__dict__.update(values)


def observes(**values: Any) -> Callable[[Any], None]:
    """Report something that is not so."""

    def wrong(engine: Any) -> None:
        right = engine.observe

        async def observe() -> Observation:
            seen: Observation = await right()
            return replace(seen, **{name: call() for name, call in values.items()})

        engine.observe = observe

    return wrong


def observing_raises_asleep(engine: Any) -> None:
    right = engine.observe

    async def observe() -> Observation:
        if engine.asleep:
            raise EngineError("no answer")
        seen: Observation = await right()
        return seen

    engine.observe = observe


def unrecorded(engine: Any) -> None:
    async def way(call: Any, right: Any) -> Returned:
        await right()
        return Returned()

    answer(engine, StopProfile, way)


def elsewhere(engine: Any) -> None:
    async def way(call: Any, right: Any) -> Returned:
        returned: Returned = await right()
        moved = tuple(replace(trace, path="other/echo.trace.json") for trace in returned.traces)
        return replace(returned, traces=moved)

    answer(engine, StopProfile, way)


def unstable(engine: Any) -> None:
    right, turns = engine.generate, iter(range(1000))

    async def generate(prompt: Any, max_tokens: int) -> Any:
        shift = next(turns)
        async for token in right(prompt, max_tokens):
            yield token + shift

    engine.generate = generate


def ids() -> Callable[[], str]:
    turns = iter(range(1000))
    return lambda: f"launch {next(turns)}"


def of_a_delta(effect: Callable[[Any], None]) -> Callable[[Any], Callable[[Any, Any], Awaitable[Returned]]]:
    """Do this instead of the load of a delta."""

    def bound(engine: Any) -> Callable[[Any, Any], Awaitable[Returned]]:
        async def way(call: Any, right: Any) -> Returned:
            if not call.source.delta:
                return await right()  # type: ignore[no-any-return]
            effect(engine)
            return Returned(took="delta")

        return way

    return bound


running = then(sets(state="running"))

FAULTS: dict[str, tuple[str, str, Callable[[Any], None]]] = {
    "tokens at random": ("generate", "other tokens the second time", unstable),
    "abort ignored": ("abort", "not aborted", does(Abort, ignored)),
    "abort that pauses": ("abort", "must not do", bound(Abort, then(sets(state="paused")))),
    "pause ignored": ("pause (abort)", "still generates", does(Pause, ignored)),
    "pause that lets run on": ("pause (abort)", "sent while it was paused got", bound(Pause, running)),
    "abort that waits": ("pause (abort)", "got all", bound(Pause, instead("wait"))),
    "wait that aborts": ("pause (wait)", "did not wait", bound(Pause, instead("abort"))),
    "wait that freezes": ("pause (wait)", "did not wait", bound(Pause, instead("keep"))),
    "keep that aborts": ("pause (keep)", "it ended the running request", bound(Pause, instead("abort"))),
    "resume ignored": ("resume", "still paused", does(Resume, ignored)),
    "pause that can't be repeated": ("calls made twice", "a second pause failed", bound(Pause, second_fails)),
    "flush ignored": ("flush", "used again after the flush", does(Flush, ignored)),
    "load ignored": ("load", "same tokens", does(Load, ignored)),
    "load without a label": ("load", "reports version 0", bound(Load, then(sets(version=0)))),
    "load that resumes": ("load", "without a resume", bound(Load, running)),
    "load that raises": ("load", "EngineError: it broke", does(Load, bad)),
    "a delta ignored": ("delta", "gave other tokens than the whole", bound(Load, of_a_delta(sets()))),
    "a delta that leaves the rest torn": (
        "delta",
        "gave other tokens than the whole",
        bound(Load, of_a_delta(sets(weights=b"uninitialized"))),
    ),
    "unchecked": ("bad checkpoint", "missing: the check was accepted", does(CheckSource, ignored)),
    "checked with another error": ("bad checkpoint", "the load raised EngineError", does(Load, bad)),
    "sleep ignored": ("sleep", "reports as asleep: nothing", does(Sleep, ignored)),
    "sleep that keeps the memory": (
        "sleep",
        "no memory was released",
        bound(Sleep, then(lambda engine: engine.__dict__.update(weights=engine.backup * 9))),
    ),
    "sleepwalking": ("sleep", "asleep, it made ", bound(Sleep, running)),  # how many, is a matter of time
    "wake ignored": ("wake", "reports as asleep", does(Wake, ignored)),
    "wake without the weights": ("wake", "other tokens", bound(Wake, then(sets(weights=b"zeros")))),
    "wake that resumes": ("wake", "generates before the resume", bound(Wake, running)),
    "no traces": ("profile", "left no trace", unrecorded),
    "traces elsewhere": ("profile", "not on the disk", elsewhere),
    "a session that stays open": ("profile", "a session after the stop", bound(StopProfile, then(sets(session=[])))),
    "a start ignored": ("profile", "no session while one was open", does(StartProfile, ignored)),
    "giving up at the deadline": ("late call", "before the running request had ended", bound(Pause, gives_up)),
    "wedged by a cancellation": ("cancelled call", "another call is under way", bound((Pause, Abort), wedges)),
    "observe raises": ("observe", "asleep: observe raised EngineError", observing_raises_asleep),
    "observe finds new launches": ("observe", "`instance` changed", observes(instance=ids())),
    "observe lies about pausing": (
        "pause (abort)",
        "reports that it still generates",
        observes(generating=lambda: True),
    ),
    "observe lists nothing": ("observe", "lists no operations", observes(operations=frozenset)),
    "observe can't be recorded": ("observe", "no log can record", observes(version=lambda: -1)),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_is_found(name: str, echo: ModuleType, folder: Path) -> None:
    row, text, break_it = FAULTS[name]
    engine = made(echo, folder)
    break_it(engine)
    only, never_ends = ({row, "sleep"} if row == "observe" else {row}), name in ("abort that pauses", "resume ignored")
    found = (await judged(engine, folder, "generate", *only, request_s=2.0 if never_ends else 30.0))[row]
    assert found.verdict == "failed" and text in found.seen, found


async def test_what_is_not_listed_or_refused_as_unsupported_is_not_offered(echo: ModuleType, folder: Path) -> None:
    engine = made(echo, folder)
    listed = frozenset(Operation) - {Operation.SLEEP, Operation.PROFILE, Operation.ADAPTERS}
    observes(operations=lambda: listed)(engine)

    async def no_freezing(call: Any, right: Any) -> Returned:
        if call.mode == "keep":
            raise UnsupportedError("it can't freeze requests")
        return await right()  # type: ignore[no-any-return]

    answer(engine, Pause, no_freezing)
    rows = await judged(engine, folder)
    verdicts = {name: row.verdict for name, row in rows.items() if row.verdict != "passed"}
    assert verdicts == dict.fromkeys(("pause (keep)", "sleep", "wake", "profile", *ADAPTERS), "not offered")
    assert rows["pause (keep)"].seen == "it can't freeze requests"
    assert {rows[name].seen for name in ADAPTERS} == {"not launched for adapters"}


async def test_an_engine_that_is_lost_is_judged_no_further(echo: ModuleType, folder: Path) -> None:
    engine = made(echo, folder)

    def die(engine: Any) -> None:
        async def generate(prompt: Any, max_tokens: int) -> Any:
            raise EngineError("connection refused")
            yield

        engine.generate = generate

    answer(engine, Load, then(die)(engine))
    rows = await judged(engine, folder)
    assert "connection refused" in rows["load"].seen
    assert rows["profile"].verdict == "failed" and rows["profile"].seen.startswith("not judged: the engine serves no")


# --- bad usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "kind", "reason"),
    [
        (("--engine", "echo:Echo"), ConfigError, "echo 1 may be in use.* Say --yes if it is not in use"),
        (("--engine", "echo:Echo", "--load", "a"), ConfigError, "give two checkpoints"),
        (("--engine", "tests.unit.test_factory:Whole"), ConfigError, "Give the backend an async generator"),
        (("--engine", "vlm"), ConfigError, "did you mean vllm?"),
        (("--engine", "sglang", "--url", "http://127.0.0.1:9", "--up-within", "0"), EngineError, "can't be commanded"),
    ],
)
def test_bad_usage_is_one_line(
    folder: Path, words: tuple[str, ...], kind: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    result = CliRunner().invoke(conform, words)
    assert isinstance(result.exception, kind) and re.search(reason, str(result.exception)), result
    assert "\n" not in str(result.exception)


async def test_how_fast_an_engine_is_does_not_depend_on_its_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was just launched takes seconds for it. Long requests would end before a call reaches them."""
    answers = iter([10.0])  # seconds; all later ones take 10 ms
    now_s = 0.0

    class Client:
        async def generate(self, prompt: Sequence[int], tokens: int, model: str = "") -> AsyncIterator[int]:
            nonlocal now_s
            now_s += next(answers, 0.01)
            for token in range(tokens):
                yield token

    monkeypatch.setattr("workers.conformance.engine_under_test.time.monotonic", lambda: now_s)
    async with anyio.create_task_group() as tasks:
        setup = Setup(root=tmp_path, checkpoints=None, traces=tmp_path)
        measuring = EngineUnderTest(cast(Engine, None), Client(), setup, tasks)
        _, longest = await measuring.measure()
    assert longest == engine_under_test.LONG_MAX


async def test_a_delta_is_judged_by_what_the_engine_generates_of_it(tmp_path: Path) -> None:
    for seed, name in enumerate("ab", 1):
        save(TinyModel(TinyConfig(), seed=seed), tmp_path / "ckpt" / name)
    engine = TinyEngine(Identity(replica=0, node_rank=0), checkpoints=tmp_path / "ckpt", traces=tmp_path / "traces")
    row = (await judged(engine, tmp_path, "generate", "delta"))["delta"]
    assert (row.verdict, row.seen) == ("passed", "the same tokens as the whole; it took delta"), row


@pytest.mark.parametrize("drops", [True, False], ids=["drops the cache", "keeps the cache"])
async def test_a_frozen_request_must_be_computed_anew_after_a_flush(
    drops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.engines.tiny.scheduler import Scheduler

    for seed, name in enumerate("ab", 1):
        save(TinyModel(TinyConfig(), seed=seed), tmp_path / "ckpt" / name)
    if not drops:
        monkeypatch.setattr(Scheduler, "flush", lambda scheduler: scheduler._kept.clear())
    engine = TinyEngine(Identity(replica=0, node_rank=0), checkpoints=tmp_path / "ckpt", traces=tmp_path / "traces")
    row = (await judged(engine, tmp_path, "generate", "flush"))["flush"]
    assert row.verdict == ("passed" if drops else "failed"), row
    assert drops or "a frozen request was not computed anew" in row.seen


# --- the clients of the engines' own routes ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "key", "base"), [("vllm", "model", "m"), ("sglang", "lora_path", None)])
def test_a_request_names_its_adapter_as_the_server_has_it(kind: str, key: str, base: str | None) -> None:
    asked: list[Any] = []

    def respond(request: Any) -> tuple[int, Any]:
        if request.path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        asked.append(json.loads(request.body)[key])
        return 200, "data: [DONE]\n\n"

    async def generate(url: str) -> None:
        client = ServerClient(kind, url)
        for model in ("policy-v7", ""):
            assert [token async for token in client.generate([1], 1, model)] == []
        await client.close()

    with HttpServer(respond) as server:
        anyio.run(generate, server.url)
    assert asked == ["policy-v7", base]


def tokens_of(kind: str, event: Any) -> list[int]:
    """What a client gets of a server that streams that event."""
    stream, models = f"data: {json.dumps(event, ensure_ascii=False)}\n\ndata: [DONE]\n\n", {"data": [{"id": "m"}]}

    async def tokens(url: str) -> list[int]:
        client = ServerClient(kind, url)
        try:
            return [token async for token in client.generate([1], 1)]
        finally:
            await client.close()

    with HttpServer(lambda request: (200, models if request.path == "/v1/models" else stream)) as server:
        return anyio.run(tokens, server.url)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_text_with_any_character_of_a_line_break_is_no_end_of_an_event(kind: str) -> None:
    """Servers write such text as it is. Only a line feed ends a line of a stream of events."""
    text = "\u2028 \u0085 \x0b"
    event = {
        "vllm": {"choices": [{"text": text, "token_ids": [7]}]},
        "sglang": {"text": text, "output_ids": [7], "meta_info": {"completion_tokens": 1}},
    }[kind]
    assert tokens_of(kind, event) == [7]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_request_that_is_refused_within_its_stream_is_refused(kind: str) -> None:
    """vLLM 0.33 refuses so what comes in a pause: 200 has been sent by then."""
    refusal = {"error": {"message": "Generation is paused.", "type": "ServiceUnavailableError", "code": 503}}
    with pytest.raises(EngineError, match="refused the request: .*Generation is paused"):
        tokens_of(kind, refusal)
