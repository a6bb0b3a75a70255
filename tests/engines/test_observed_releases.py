"""What an observing agent asks of every release of both engines, over HTTP and in process: it reads, and does no more.

The releases are stand-ins made from their source, which record every request and call, and refuse what they lack.
"""

from pathlib import Path
from typing import Final

import pytest

from schemas.events import Observation
from schemas.identity import Identity, RolloutMode
from tests.engines import surfaces
from tests.engines.releases import OverHTTP, Transport, attached, releases
from workers.engine import EngineView
from workers.engines.client import EngineReader
from workers.engines.observed import ObservedEngine
from workers.engines.sglang.launch import SGLANG
from workers.engines.sglang.server import SGLangReader
from workers.engines.vllm.launch import VLLM
from workers.engines.vllm.server import VLLMReader

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PLACE: Final = Identity(replica=0, node_rank=0, mode=RolloutMode.OBSERVED)
ROUTES: Final = {
    "sglang": {"/openapi.json": "0", "/server_info": "0", "/model_info": "0", "/metrics": "0", "/ready": "0.5.20"},
    "vllm": {
        **dict.fromkeys(("/openapi.json", "/server_info", "/version", "/is_sleeping", "/metrics"), "0"),
        "/is_paused": "0",
        "/weight_info": "0.29.0",
    },
}
"""Every route that may be asked, always by GET and without a body, with the first release that has it."""
METHODS: Final = {
    "sglang": {"config_value": "0.5.20"},
    "vllm": {"check_health": "0", "is_paused": "0", "is_sleeping": "0", "get_weight_version": "0.29.0"},
}
"""Every method that may be called in process; everything else that is read is an attribute."""


def known(table: dict[str, str], version: str) -> set[str]:
    return {name for name, since in table.items() if surfaces.number(since) <= surfaces.number(version)}


@pytest.mark.parametrize("transport", ["http", "in_process"])
@pytest.mark.parametrize(("kind", "version"), releases())
async def test_an_observer_reads_and_does_no_more(
    transport: Transport, kind: surfaces.Kind, version: str, tmp_path: Path
) -> None:
    async with attached(transport, kind, version, tmp_path) as engine:
        if isinstance(engine, OverHTTP):
            reader = SGLangReader("http://engine") if kind == "sglang" else VLLMReader("http://engine")
            reader._pool = engine.app  # type: ignore[assignment]
            seen = await look(kind, reader)
            assert {(request.method, request.query, request.body) for request in engine.app.requests} <= {
                ("GET", (), None),
                ("GET", (("config_format", "json"),), None),  # of vLLM's /server_info
            }
            assert {request.path for request in engine.app.requests} == known(ROUTES[kind], version)
            assert all(request.status == 200 or request.path == "/metrics" for request in engine.app.requests)
        else:
            engine.standin.calls.clear()
            seen = await look(kind, engine.client)
            called = {call.method for call in engine.standin.calls}
            assert called == known(METHODS[kind], version)
        label = "default" if kind == "sglang" or surfaces.number(version) >= (0, 29) else None
        assert (seen.tokenizer, seen.label) == ("present", label)


async def look(kind: surfaces.Kind, reader: EngineReader) -> Observation:
    """Attach, look twice, and detach."""
    engine: EngineView
    engine = ObservedEngine(SGLANG, PLACE, reader) if kind == "sglang" else ObservedEngine(VLLM, PLACE, reader)
    await engine.open()
    await engine.observe()
    seen = await engine.observe()
    await engine.close()
    return seen
