"""Real engines with LoRA adapters under a real agent: which version made a token is read from its log probabilities."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import get_args

import pytest

from schemas.errors import CheckpointError
from schemas.identity import Operation
from tests.engines.adapters import save_adapter
from tests.engines.lora_fleet import MODULES, RANK, LoRAFleet, near
from tests.engines.models import HIDDEN
from tests.engines.servers import VLLM_TOKENS, probed, wait_for
from tests.engines.surfaces import Kind

KINDS = [
    pytest.param(kind, marks=[getattr(pytest.mark, f"engine_{kind}"), pytest.mark.timeout(900)])
    for kind in get_args(Kind)
]

LONG, SHORT = 2000, 40
"""Tokens of a request that outlasts some others, and of one of those."""
ENDLESS = {"vllm": VLLM_TOKENS - 100, "sglang": 4000}
"""Of one that runs until it is closed. SGLang takes no more of its context, and a minute to make them."""
PROMPT = [11, 42, 7, 99]


@pytest.fixture(scope="module", params=KINDS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoRAFleet]:
    """One replica, which no test leaves without a version to serve."""
    with ExitStack() as open_:
        fleet = LoRAFleet(request.param, tmp_path_factory.mktemp("lora"), open_)
        fleet.sync(fleet.save("first", 1)).raise_unless_committed()
        fleet.served()
        yield fleet


def test_the_probe_and_the_engine_know_what_it_was_launched_for(fleet: LoRAFleet) -> None:
    code, found = probed(fleet.url)
    assert code == 0 and Operation.ADAPTERS in found["has"]
    assert fleet.listed() == {fleet.adapter.model: f"{fleet.folder}/{fleet.adapter.path}"}


def test_a_then_b_then_a(fleet: LoRAFleet) -> None:
    base, made = fleet.scores(None), []
    for step, seed in (("a", 11), ("b", 12), ("a again", 11)):
        fleet.sync(fleet.save(step, seed)).raise_unless_committed()
        made.append(fleet.scores(fleet.served().model))
    a, b, again = made
    assert near(a, again) and not near(a, b) and not near(a, base) and not near(b, base)
    assert near(fleet.scores(None), base)


def test_requests_in_flight_end_on_the_version_that_they_began_with(fleet: LoRAFleet) -> None:
    fleet.rest()
    fleet.sync(fleet.save("old", 21)).raise_unless_committed()
    old = fleet.served().model
    fleet.rest()
    path = fleet.save("new", 22)
    with closing(fleet.begin(old, ENDLESS[fleet.kind], PROMPT)) as before:
        fleet.sync(path).raise_unless_committed()
        new = fleet.served().model
        turn = len(before.tokens)  # those that follow are made after the commit
        after = fleet.begin(new, SHORT, PROMPT)
        made = before.grows_to(turn + SHORT).tokens[: turn + SHORT]
    before.end()
    for begin in (0, turn):  # not all of them at once: rounding differs with what else runs, and adds up
        alone = fleet.scores(old, SHORT, [*PROMPT, *made[:begin]])
        assert made[begin : begin + SHORT] == [token for token, _ in alone]
    assert after.all() == [token for token, _ in fleet.scores(new, SHORT, PROMPT)]


def test_a_broken_adapter_reaches_no_engine(fleet: LoRAFleet) -> None:
    route = "/load_lora_adapter"
    held, asked = fleet.adapter, fleet.calls(route)
    wide = {name: (rows, HIDDEN + 1) for name, (rows, _) in MODULES.items()}
    half = save_adapter(fleet.folder / "adapters" / "half", MODULES, RANK)
    (half / "adapter_model.safetensors").write_bytes((half / "adapter_model.safetensors").read_bytes()[:-1])
    save_adapter(fleet.folder / "adapters" / "wide", wide, RANK)
    save_adapter(fleet.folder / "adapters" / "rank", MODULES, 32)
    with pytest.raises(CheckpointError, match="cut off"):
        fleet.sync("adapters/half")
    for path, says in (("wide", "lora_A must have 256 columns"), ("rank", "launched for 16")):
        report = fleet.sync(f"adapters/{path}")
        assert report.status == "aborted" and says in str(report), report
    found = fleet.adapter
    assert (found.model, found.replicas) == (held.model, held.replicas) and fleet.calls(route) == asked > 0
    assert fleet.scores(held.model)


def test_files_of_dropped_versions_can_go(fleet: LoRAFleet) -> None:
    fleet.rest()
    fleet.sync(fleet.save("kept", 31))
    first = fleet.served()
    fleet.rest()
    request = fleet.begin(first.model, LONG)
    for step, seed in (("newer", 32), ("newest", 33)):
        fleet.sync(fleet.save(step, seed)).raise_unless_committed()
    newest = fleet.served()
    oldest = fleet.adapter.oldest
    made = request.all()
    assert oldest <= first.version or len(made) == LONG  # it was held for as long as the request ran
    wait_for("the version that is no longer wanted is gone", lambda: fleet.adapter.oldest > first.version, 60)
    shutil.rmtree(fleet.folder / first.path)
    assert made and first.model not in fleet.listed()
    for model in fleet.listed():
        assert fleet.scores(model)
    fleet.sync(fleet.save("after", 34)).raise_unless_committed()
    assert fleet.scores(fleet.served().model) and newest.model in fleet.listed()


def test_a_server_that_is_launched_again_holds_all_live_adapters(fleet: LoRAFleet) -> None:
    for step, seed in (("one", 41), ("two", 42)):
        fleet.rest()
        fleet.sync(fleet.save(step, seed)).raise_unless_committed()
    held = fleet.rest()
    scores = {model: fleet.scores(model) for model in held}
    fleet.kill_server()
    wait_for("the server is missed", lambda: not fleet.adapter.replicas, 60)
    fleet.served()
    assert fleet.listed() == held
    for model, before in scores.items():
        assert near(fleet.scores(model), before)


def test_a_drop_leaves_nothing(fleet: LoRAFleet) -> None:
    fleet.plane.drop_adapter("policy").wait()
    wait_for("no adapter is listed", lambda: not fleet.listed(), 60)
    assert fleet.scores(None) and "policy" not in fleet.plane.adapters()
