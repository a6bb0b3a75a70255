"""A trainer that embeds an engine with LoRA adapters: `python -m tests.engines.embedded_adapters vllm|sglang FOLDER`.

It calls the backend itself, in the environment that has the engine, and writes what it saw to FOLDER/report.json.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import anyio

from schemas.commands import AdapterVersion
from schemas.errors import RefusedError
from schemas.events import CheckAdapter, LoadAdapter, UnloadAdapter
from tests.engines.adapters import save_adapter
from tests.engines.embedded import LONG, VLLM, Request, Rollout, SGLang
from tests.engines.lora_fleet import MODULES, RANK

VLLM_OPTIONS: Final[dict[str, Any]] = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2, "max_cpu_loras": 4}
SGLANG_OPTIONS: Final[dict[str, Any]] = {
    **{"enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 3, "max_loaded_loras": 4},
    **{"lora_backend": "torch_native", "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}


async def main(kind: str, folder: Path) -> None:
    rollout: Rollout = VLLM(folder, **VLLM_OPTIONS) if kind == "vllm" else SGLang(folder, **SGLANG_OPTIONS)
    backend = rollout.backend
    await backend.open()
    tokens = [(await rollout.generate()).tokens]
    for version, seed in ((1, 11), (2, 12), (3, 11)):
        adapter = AdapterVersion(name="policy", version=version, path=f"a{version}")
        save_adapter(folder / "checkpoints" / adapter.path, MODULES, RANK, seed)
        await backend.perform(CheckAdapter(adapter), 1.0)
        await backend.perform(LoadAdapter(adapter), 1.0)
        tokens.append((await rollout.generate(adapter=adapter.model)).tokens)
    held = (await backend.observe()).adapters
    request, refused = Request(), ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.follow, request, LONG, "policy-v1")
        await request.first.wait()
        try:
            await backend.perform(UnloadAdapter("policy-v1", waited=True), 1.0)
        except RefusedError as error:
            refused = str(error)
    await backend.perform(UnloadAdapter("policy-v1", waited=False), 1.0)
    left = (await backend.observe()).adapters
    report = {"tokens": tokens, "held": held, "refused": refused, "request": request.tokens, "left": left}
    await anyio.Path(folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
    os._exit(0)  # neither engine ends by itself
