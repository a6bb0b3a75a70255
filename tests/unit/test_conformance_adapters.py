"""The acceptance kit and LoRA adapters: it finds each fault of an engine that has them, and leaves nothing behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from schemas.events import CheckAdapter, LoadAdapter, Observation, UnloadAdapter
from schemas.identity import Identity
from tests.unit.broken_backends import ADAPTERS, answer, bad, bound, does, ignored, judged, then
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

LONG = TinyConfig(context=512)
"""Requests of this model still run when a load has ended."""


def tiny(folder: Path) -> Any:
    """The engine, and two checkpoints of its model."""
    for seed, name in enumerate("ab", 1):
        save(TinyModel(LONG, seed), folder / "ckpt" / name)
    place = Identity(replica=0, node_rank=0)
    return TinyEngine(place, checkpoints=folder / "ckpt", traces=folder / "traces", config=LONG)


def files(folder: Path) -> list[str]:
    """What is among the checkpoints."""
    return sorted(path.name for path in (folder / "ckpt").rglob("*"))


def once_loaded(effect: Callable[[Any, str], None]) -> Callable[[Any], None]:
    """Load an adapter right, and then do something to the engine's adapters or requests, on its thread."""

    def break_it(engine: Any) -> None:
        async def way(call: Any, right: Any) -> None:
            await right()
            engine._scheduler.run(effect, engine._scheduler, call.adapter.model)

        answer(engine, LoadAdapter, way)

    return break_it


def merged(scheduler: Any, model: str) -> None:
    for name, delta in scheduler._adapters[model].items():
        scheduler.model.get_parameter(name).data += delta


def in_place_of_all(scheduler: Any, model: str) -> None:
    scheduler._adapters.update(dict.fromkeys(scheduler._adapters, scheduler._adapters[model]))


def as_the_first(scheduler: Any, model: str) -> None:
    scheduler._adapters[model] = next(iter(scheduler._adapters.values()))


def under_requests(scheduler: Any, model: str) -> None:
    for request in scheduler._requests:
        request.adapter = scheduler._adapters[model]


def lists(path: str) -> Callable[[Any], None]:
    """Report another path of each adapter."""

    def break_it(engine: Any) -> None:
        right = engine.observe

        async def observe() -> Observation:
            seen: Observation = await right()
            return replace(seen, adapters=dict.fromkeys(seen.adapters or (), path))

        engine.observe = observe

    return break_it


def kept_when_unloaded(engine: Any) -> None:
    async def way(call: Any, right: Any) -> None:
        held = engine._scheduler._adapters[call.model]
        await right()
        engine._scheduler._adapters[call.model] = held

    answer(engine, UnloadAdapter, way)


def aborting_when_unloaded(engine: Any) -> None:
    async def way(call: Any, right: Any) -> None:
        engine._scheduler.run(engine._scheduler.abort)
        await right()

    answer(engine, UnloadAdapter, way)


ADAPTER_FAULTS: dict[str, tuple[str, str, Callable[[Any], None]]] = {
    "load ignored": ("adapter", "there is no adapter", does(LoadAdapter, ignored)),
    "load that raises": ("adapter", "EngineError: it broke", does(LoadAdapter, bad)),
    "no effect": ("adapter", "those of the base", once_loaded(lambda held, model: held._adapters.update({model: {}}))),
    "merged into the base": ("adapter", "the same prompt had other tokens", once_loaded(merged)),
    "listed from elsewhere": ("adapter", "from elsewhere, and not from", lists("elsewhere")),
    "in place of the first": ("second adapter", "-v1 has other tokens than before", once_loaded(in_place_of_all)),
    "the first under both names": ("second adapter", "its tokens are those of", once_loaded(as_the_first)),
    "under running requests": ("second adapter", "did not go on with the first", once_loaded(under_requests)),
    "load that aborts": ("second adapter", "a running request got", once_loaded(lambda held, _: held.abort())),
    "unload ignored": ("adapter unload", "was accepted, and it is still listed", does(UnloadAdapter, ignored)),
    "unload of the list alone": ("adapter unload", "named it afterwards got 8 tokens", kept_when_unloaded),
    "unload that aborts": ("adapter unload", "a running request got", aborting_when_unloaded),
    "unload of all": (
        "adapter unload",
        "-v2 has other tokens than before",
        bound(UnloadAdapter, then(lambda engine: engine._scheduler._adapters.clear())),
    ),
    "unchecked": ("bad adapter", "of other shapes: the check was accepted", does(CheckAdapter, ignored)),
    "unchecked load": ("bad adapter", "of other shapes: the load was accepted", does(LoadAdapter, ignored)),
    "refused with another error": ("bad adapter", "cut off: the load raised EngineError", does(LoadAdapter, bad)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADAPTER_FAULTS)
async def test_each_fault_with_adapters_is_found(name: str, tmp_path: Path) -> None:
    row, text, break_it = ADAPTER_FAULTS[name]
    engine = tiny(tmp_path)
    break_it(engine)
    found = (await judged(engine, tmp_path, "generate", row))[row]
    assert found.verdict == "failed" and text in found.seen, found


async def test_adapters_of_the_kit_are_gone_afterwards_with_their_files(tmp_path: Path) -> None:
    engine, left = tiny(tmp_path), list[Any]()
    close = engine.close

    async def closing() -> None:
        left.append((await engine.observe()).adapters)
        await close()

    engine.close = closing
    before = files(tmp_path)
    rows = await judged(engine, tmp_path, "generate", *ADAPTERS)
    assert {row.verdict for row in rows.values()} == {"passed"}, list(rows.values())
    assert "a running request ended on the first" in rows["second adapter"].seen
    assert left == [{}] and files(tmp_path) == before


async def test_without_the_files_of_a_model_no_adapter_fits_it(tmp_path: Path) -> None:
    engine = tiny(tmp_path)
    rows = await judged(engine, tmp_path, "generate", *ADAPTERS, checkpoints=None)
    assert all("not judged: the shapes of its model" in rows[name].seen for name in ADAPTERS), rows


async def test_files_of_an_adapter_that_is_still_listed_stay(tmp_path: Path) -> None:
    """An engine may read them again, and end if they are gone."""
    engine = tiny(tmp_path)
    answer(engine, UnloadAdapter, ignored)
    rows = await judged(engine, tmp_path, "generate", "adapter")
    assert rows["adapter"].verdict == "passed" and rows["adapter unload"].verdict == "failed"
    assert files(tmp_path).count("adapter_model.safetensors") == 2
