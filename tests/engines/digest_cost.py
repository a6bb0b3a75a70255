"""What proving a load costs: the same loads with and without the engine's checksums, in turn, on a real server.

    python -m tests.engines.digest_cost sglang     # prints one line of JSON; vllm and vllm-unpacked likewise

The share is what docs/engines.md says. Times of a busy machine mean little, and their ratio is of one run.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import anyio

from schemas.commands import Checkpoint
from schemas.events import Load
from schemas.identity import Digests, Identity
from tests.engines.models import Size, save_model, save_weights, weights
from tests.engines.servers import EngineServer
from tests.engines.vllm_fleet import UNI, UNI_ENVIRONMENT
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.server import VLLMServer

ROUNDS = 8
LARGE = Size(hidden=1024, layers=16, heads=16, kv_heads=2)


async def measured(kind: str, url: str, folder: Path) -> dict[str, float]:
    """Load a and b in turn. Returns the median milliseconds without and with checksums, and what they add."""
    place, traces = Identity(replica=0, node_rank=0), folder / "traces"
    engine: VLLMEngine | SGLangEngine = VLLMEngine(place, VLLMServer(url), checkpoints=folder, traces=traces)
    if kind == "sglang":
        engine = SGLangEngine(place, SGLangServer(url), checkpoints=folder, traces=traces)
    await engine.open()
    times: dict[Digests, list[float]] = {"never": [], "always": []}
    for round_ in range(2 * ROUNDS):
        digests: Digests = "always" if round_ % 2 else "never"
        engine._digests = digests
        began = time.perf_counter()
        done = await engine.perform(Load(round_ + 1, Checkpoint("ab"[round_ // 2 % 2]), None), 600)
        times[digests].append((time.perf_counter() - began) * 1000)
        assert (done.digest is not None) == (digests == "always")
    await engine.close()
    without, proven = median(times["never"]), median(times["always"])
    return {"load_ms": round(without), "proven_ms": round(proven), "added_percent": round(100 * (proven / without - 1))}


def main(kind: str) -> None:
    options: tuple[str, ...]
    variables: Mapping[str, str]
    options, variables = ((), {}) if kind == "sglang" else (UNI, UNI_ENVIRONMENT)
    if kind == "vllm-unpacked":
        options = (*options, "--worker-extension-cls", "tests.engines.unpacked_vllm.Extension")
        variables = {**variables, "PYTHONPATH": str(Path(__file__).parents[2])}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        save_model(folder / "a", 1, LARGE)
        save_weights(folder / "b", weights(2, LARGE))
        megabytes = round((folder / "b" / "model.safetensors").stat().st_size / 1e6)
        with EngineServer(kind.partition("-")[0], folder / "a", folder, *options, variables=variables) as server:
            server.wait_up("/server_info" if kind == "sglang" else "/health")
            print(json.dumps({"engine": kind, "megabytes": megabytes} | anyio.run(measured, kind, server.url, folder)))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
