"""Checks of LoRA adapters, by tokens and by what the engine lists. The kit makes the adapters, for the engine's model.

They change the projections of queries and values, which every engine serves; all modules of the layers in a model that
has none of these. Their rank is 1, which is within any launch.
"""

import json
import random
import re
import secrets
import shutil
from array import array
from collections.abc import Sequence
from itertools import count
from math import prod
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread
from msgspec.structs import replace

from schemas import events
from schemas.commands import AdapterVersion, Manifest
from schemas.errors import EngineError
from schemas.safetensors.format import read_layout
from schemas.safetensors.manifest import ADAPTER_CONFIG, read_checkpoint
from workers.conformance.bad_checkpoints import refused, write_safetensors
from workers.conformance.engine_under_test import ROUNDS, CheckResult, EngineUnderTest, Setup, Tokens, if_true
from workers.engines.adapter_files import WEIGHTS

_SERVED: Final = ("q_proj", "v_proj")
_IN_A_LAYER: Final = re.compile(r".+\.\d+\..+\.weight", re.ASCII)


class AdapterChecks:
    """Each check begins with an engine that serves, and leaves it serving, without adapters of the kit."""

    def __init__(self, engine: EngineUnderTest, setup: Setup) -> None:
        self._engine, self._setup = engine, setup
        self._name, self._numbers = f"conform-{secrets.token_hex(4)}", count(1)
        self._held: dict[AdapterVersion, Tokens] = {}  # what each version that the engine should have made of PROMPT

    async def adapters(self) -> tuple[CheckResult, ...]:
        """A version, a second one beside it while a request runs on the first, and the first unloaded."""
        try:
            first, second = await self._write(), await self._write()
            await self._engine.perform(events.LoadAdapter(first))
            loaded = CheckResult(await self._found(first), "other tokens than the base; listed from its path")
            return loaded, await self._beside(first, second), await self._unloaded(first)
        finally:
            await self._leave_none()

    async def bad_adapter(self) -> tuple[CheckResult, ...]:
        """Adapters that don't fit are refused by the check and by the load, and nothing else changes."""

        def calls(path: str, manifest: Manifest) -> tuple[events.CheckAdapter, events.LoadAdapter]:
            bad = replace(good, path=path, manifest=manifest, config="")
            return events.CheckAdapter(bad), events.LoadAdapter(bad)

        try:
            good = await self._write()
            return (await refused(self._engine, self._setup.root, good.path, calls, paused=False),)
        finally:
            await self._leave_none()

    async def _beside(self, first: AdapterVersion, second: AdapterVersion) -> CheckResult:
        request = await self._engine.begin_long(first.model)
        await self._engine.perform(events.LoadAdapter(second))
        went_on, anew = await self._engine.continued(request, len(request.tokens), first.model)
        faults = (
            *request.cut_short(),
            *await self._found(second),
            *if_true(went_on != anew, "a running request did not go on with the first version"),
        )
        ended = "ended on the first" if went_on else "ended too soon to tell"
        return CheckResult(faults, f"each version has tokens of its own; a running request {ended}")

    async def _unloaded(self, first: AdapterVersion) -> CheckResult:
        engine = self._engine
        request = await engine.begin_long(first.model)
        early = await engine.answer(events.UnloadAdapter(first.model, waited=False))
        await engine.end(request)
        answer = await self._unload(first.model)
        del self._held[first]
        faults = [*request.cut_short(), *await self._faults()]
        if first.model in await self._listed():
            return CheckResult((*faults, f"the unload {answer}, and it is still listed"), "")
        shutil.rmtree(self._setup.root / first.path)  # or SGLang loads it again for the next request
        late = len(await engine.tokens_after(first.model))
        faults += if_true(late, f"a request that named it afterwards got {late} tokens")
        return CheckResult(faults, f"under a request, the unload {early}; then it was gone, the second as before")

    async def _found(self, version: AdapterVersion) -> list[str]:
        """Return what is wrong after a version was loaded."""
        own = await self._engine.tokens(model=version.model)
        others = {"the base": self._engine.expected} | {other.model: held for other, held in self._held.items()}
        same = [f"its tokens are those of {name}" for name, tokens in others.items() if tokens == own]
        self._held[version] = own
        return [*same, *await self._faults()]

    async def _faults(self) -> list[str]:
        """Return what is wrong with the base and the versions that the engine should have."""
        faults, listed = [*await self._engine.changed()], await self._listed()
        for version, tokens in self._held.items():
            model, path = version.model, listed.get(version.model)
            faults += if_true(path != version.path, f"it lists {model} from {path}, and not from {version.path}")
            faults += if_true(await self._engine.tokens_after(model) != tokens, f"{model} has other tokens than before")
        return faults

    async def _listed(self) -> dict[str, str]:
        """Return what the engine lists of the kit's versions, and from where."""
        listed = (await self._engine.observe("with adapters")).adapters or {}
        return {model: path for model, path in listed.items() if model.startswith(f"{self._name}-v")}

    async def _unload(self, model: str) -> str:
        """Unload a version that requests ran on: an engine may see their end later. Returns what came of it."""
        for _ in range(ROUNDS):
            answer = await self._engine.answer(events.UnloadAdapter(model, waited=True))
            if answer != "raised RefusedError":
                break
            await anyio.sleep(self._engine.silence_s)
        return answer

    async def _leave_none(self) -> None:
        """Unload all. Files of one that is still listed stay: an engine may read them again, and end without."""
        self._held = {}
        for model in await self._listed():
            await self._unload(model)
        if not await self._listed():
            shutil.rmtree(self._setup.root / self._name, ignore_errors=True)

    async def _write(self) -> AdapterVersion:
        number, root = next(self._numbers), self._setup.root
        remedies = (await self._engine.observe("before an adapter")).remedies or events.Remedies()
        places = [root / place for place in (remedies.launched_from, *(self._setup.checkpoints or ())) if place]
        path = f"{self._name}/{number}"
        await to_thread.run_sync(_write_adapter, root / path, places, number)
        found = await to_thread.run_sync(read_checkpoint, root / path, True)
        made = AdapterVersion(name=self._name, version=number, path=path, manifest=found.manifest, config=found.config)
        await self._engine.perform(events.CheckAdapter(made))
        return made


def _write_adapter(directory: Path, bases: Sequence[Path], seed: int) -> None:
    """Write an adapter, as PEFT does, for the model whose weights are in one of these places."""
    base = next((place for place in bases if place.is_dir()), None)
    if base is None:
        raise EngineError("not judged: the shapes of its model can't be read here. Give two checkpoints of it")
    found = read_layout(base).items()
    layers = {name.removesuffix(".weight"): spec.shape for name, spec in found if _IN_A_LAYER.fullmatch(name)}
    layers = {name: shape for name, shape in layers.items() if len(shape) == 2}
    modules = {name: shape for name, shape in layers.items() if name.endswith(_SERVED)} or layers
    draw, header, data = random.Random(seed), dict[str, object](), array("f")
    for name, (rows, columns) in modules.items():
        for side, shape in (("A", (1, columns)), ("B", (rows, 1))):
            start = data.itemsize * len(data)
            data.extend(draw.uniform(-1, 1) for _ in range(prod(shape)))
            entry = {"dtype": "F32", "shape": shape, "data_offsets": (start, data.itemsize * len(data))}
            header[f"base_model.model.{name}.lora_{side}.weight"] = entry
    write_safetensors(directory / WEIGHTS, header, 0)
    with (directory / WEIGHTS).open("ab") as opened:
        data.tofile(opened)
    targets = sorted({name.rpartition(".")[2] for name in modules})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": targets, "bias": "none"}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))
