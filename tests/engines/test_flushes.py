"""How backends ask for a flush: of frozen requests at once, of running ones again and again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.identity import Identity
from workers.engines.client import CallRefused
from workers.engines.sglang import engine as sglang
from workers.engines.sglang import launch as sglang_launch
from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm.engine import VLLMEngine

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PLACE = Identity(replica=0, node_rank=0)


class Client:
    """Refuses the first calls."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals, self.asked = refusals, list[Mapping[str, Any]]()

    async def call(self, method: str, /, **arguments: object) -> object:
        self.asked.append(arguments)
        if len(self.asked) <= self.refusals:
            raise CallRefused("requests run", 400, "requests run")
        return True


async def test_sglang_is_asked_at_first_without_waiting_for_frozen_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush with a time waits for them too, and they don't end while they are frozen."""
    monkeypatch.setattr(sglang, "RETRY_S", 0.0)
    launch = sglang_launch.read_launch({}, {"flush_cache": frozenset({"timeout"})})
    engine = sglang.SGLangEngine(PLACE, None, checkpoints=tmp_path, traces=tmp_path)
    client = Client(refusals=1)
    await engine._flush(client, launch, 60.0)  # type: ignore[arg-type]
    first, second = (asked["timeout_s"] for asked in client.asked)
    assert first == 0 and second == sglang.FLUSH_WAIT_S


@pytest.mark.parametrize(
    ("parameters", "asked"),
    [({"reset_running_requests"}, {"reset_running_requests": True}), (set(), {})],
    ids=["computes anew", "can't"],
)
async def test_vllm_computes_requests_anew_where_it_can(
    parameters: set[str], asked: dict[str, bool], tmp_path: Path
) -> None:
    launch = vllm_launch.read_launch({}, {"reset_prefix_cache": frozenset(parameters)})
    client = Client()
    await VLLMEngine(PLACE, None, checkpoints=tmp_path, traces=tmp_path)._flush(client, launch, 1.0)  # type: ignore[arg-type]
    assert client.asked == [asked] and launch.recomputes is bool(parameters)
