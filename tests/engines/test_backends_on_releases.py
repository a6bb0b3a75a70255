"""The backends against every release whose source is read: they send nothing that it ignores, refuses or lacks.

If a backend can't do something with a release, it says so before it sends anything that would not be accepted.
"""

from pathlib import Path

import pytest

from schemas.identity import Operation
from tests.engines import surfaces
from tests.engines.releases import CACHE, CALLS, OverHTTP, Transport, attached, releases
from workers.engines.http import UNREADABLE

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

IGNORED = "POST /sleep: has no query parameter mode"
"""A real vLLM before 0.17 ignores this parameter, as intended. No release may get anything else that it lacks."""


@pytest.mark.parametrize("transport", ["http", "in_process"])
@pytest.mark.parametrize(("kind", "version"), releases())
async def test_every_call_fits_the_release(
    transport: Transport, kind: surfaces.Kind, version: str, tmp_path: Path
) -> None:
    async with attached(transport, kind, version, tmp_path) as engine:
        seen = await engine.backend.observe()
        assert seen.tokenizer == "present" and seen.instance is not None
        for operation, call, since in CALLS:
            before = len(engine.calls())
            refusal = await engine.refusal(call) if operation in seen.operations else f"it can't {operation}"
            refusal = "" if IGNORED in refusal and surfaces.number(version) < (0, 17) else refusal
            made = engine.calls()[before:]
            first = "0.26.0" if operation is Operation.ABORT and transport == "http" else since
            can = kind == "sglang" or surfaces.number(first) <= surfaces.number(version)
            if not can and operation is Operation.WAKE and call.tags == CACHE:  # type: ignore[union-attr]
                assert (made, refusal) == ([], "")  # it woke with the weights
            else:
                assert (bool(made), refusal == "") == (can, can), f"{call}: made {made}, refused with {refusal!r}"
        if isinstance(engine, OverHTTP):
            ignores = kind == "vllm" and surfaces.number(version) < (0, 17)
            refused = [
                request
                for request in engine.app.requests
                if request.status != 200
                and not (ignores and request.path == "/sleep")
                and {value for _, value in request.query} != {UNREADABLE}
                # An application of its own below the server's, so the source lists no route. SGLang's is optional.
                and request.path != "/metrics"
            ]
            assert refused == []
        else:
            assert seen.generating is (kind == "sglang" or surfaces.number(version) >= (0, 17))
