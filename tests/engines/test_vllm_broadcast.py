"""A broadcast to a real vLLM, sent by vLLM's own trainer side: whole, and broken off half way.

A CPU has no NCCL, so the group is one of gloo, registered with vLLM from outside (`gloo_transfer.py`). Agent, backend
and sender are those of NCCL.
"""

import json
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engines.models import save_model, save_weights, weights
from tests.engines.servers import AgentProcess, EngineServer, Process, environment, free_port
from tests.engines.vllm_fleet import UNI, UNI_ENVIRONMENT
from tests.environments import ROOT, python

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(600)]

TRANSFER = (
    "--weight-transfer-config",
    '{"backend":"gloo"}',
    "--worker-extension-cls",
    "tests.engines.gloo_transfer.Extension",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the trainer saw."""
    folder = tmp_path_factory.mktemp("broadcast")
    save_model(folder / "a", 1)
    for name, seed in (("b", 2), ("c", 3)):
        save_weights(folder / name, weights(seed))
    variables = UNI_ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    with ExitStack() as open_:
        server = open_.enter_context(EngineServer("vllm", folder / "a", folder, *UNI, *TRANSFER, variables=variables))
        bus = f"tcp://127.0.0.1:{free_port()}"
        server.wait_up()
        open_.enter_context(AgentProcess(bus, folder, "0.0", 1, "--engine", "vllm", "--url", server.url))
        call = [str(python("vllm")), "-m", "tests.engines.vllm_trainer", str(folder), server.url, bus]
        trainer = open_.enter_context(Process(call, folder / "trainer.log", environment("vllm") | variables))
        assert trainer.process.wait(400) == 0, trainer.output[-3000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


WHOLE = {"checker": 200, "paused": False, "health": 200}


def test_what_vllms_own_trainer_side_sends_is_served_and_the_group_is_used_again(found: dict[str, Any]) -> None:
    status, tokens, seen = found["sent"]
    assert (status, seen) == ("committed", WHOLE | {"label": "1"})
    assert tokens != found["launched"]
    assert found["again"] == ["committed", tokens, WHOLE | {"label": "2"}]


def test_an_update_that_breaks_off_leaves_the_engine_paused_and_a_whole_one_heals_it(found: dict[str, Any]) -> None:
    """It answers its health check, and would die of any forward."""
    status, reason, seen = found["torn"]
    assert status == "aborted" and reason.endswith("ConnectionError: broken after 30 tensors")
    assert seen == {"checker": 500, "paused": True, "health": 200, "label": "2"}
    status, tokens, seen = found["healed"]
    assert (status, seen) == ("committed", WHOLE | {"label": "4"})
    assert tokens not in (found["launched"], found["sent"][1])


def test_with_a_checkpoint_beside_it_the_committed_weights_are_loaded_again_before_it_resumes(
    found: dict[str, Any],
) -> None:
    status, tokens, seen = found["back"]
    assert (status, seen) == ("aborted", WHOLE | {"label": "4"})
    assert tokens == found["healed"][1]
