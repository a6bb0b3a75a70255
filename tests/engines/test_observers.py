"""What an agent that only observes has of an engine offers nothing but to look (tests/processes/test_observe.py)."""

from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.identity import Identity, RolloutMode
from tests.engines.http_servers import HttpServer
from workers.agent import Agent
from workers.engine import EngineView
from workers.engines.observed import ObservedEngine
from workers.engines.sglang.launch import SGLANG
from workers.engines.sglang.server import ROUTES as SGLANG_ROUTES
from workers.engines.sglang.server import SGLangReader
from workers.engines.vllm.launch import VLLM
from workers.engines.vllm.server import ROUTES as VLLM_ROUTES
from workers.engines.vllm.server import VLLMReader

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


def observer(replica: int) -> Identity:
    return Identity(replica=replica, node_rank=0, mode=RolloutMode.OBSERVED)


def view(kind: str, url: str) -> EngineView:
    if kind == "sglang":
        return ObservedEngine(SGLANG, observer(0), SGLangReader(url))
    return ObservedEngine(VLLM, observer(0), VLLMReader(url))


@pytest.mark.parametrize(("reader", "routes"), [(SGLangReader, SGLANG_ROUTES), (VLLMReader, VLLM_ROUTES)])
async def test_a_reader_has_no_way_to_call(reader: type[SGLangReader | VLLMReader], routes: dict[str, object]) -> None:
    with HttpServer(lambda _: (200, {})) as server:
        reads = reader(server.url)
        public = {name for name in dir(reads) if not name.startswith("_")}
        assert public == {"close", "get", "info", "methods", "open", "read", "where"}
        for method in routes:
            if routes[method].verb != "GET":  # type: ignore[attr-defined]
                with pytest.raises(KeyError):
                    await reads.read(method)
        assert server.requests == []
        await reads.close()


def test_a_view_offers_nothing_but_to_look(tmp_path: Path) -> None:
    for engine in (view("vllm", "http://h:1"), view("sglang", "http://h:1")):
        assert {name for name in dir(engine) if not name.startswith("_")} - {"current_launch"} == {
            *("open", "observe", "close")
        }
        with pytest.raises(ConfigError, match="can only be observed"):
            Agent(bus="tcp://127.0.0.1:1", identity=Identity(replica=0, node_rank=0), engine=engine, state_dir=tmp_path)
