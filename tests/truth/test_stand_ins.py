"""What the table assumes about the engines that verl calls, checked in the source of their releases."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines import wheels
from tests.truth.verl_code import driven

pytestmark = [pytest.mark.engine_wheels, pytest.mark.timeout(600)]

SGLANG, VLLM = wheels.RELEASES["sglang"], wheels.RELEASES["vllm"]


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    """Fetch all wheels in parallel: one by one they take minutes."""
    wheels.fetch_all()


@pytest.mark.parametrize("version", SGLANG)
def test_sglangs_schedulers_refuse_a_stop_without_a_session(version: str) -> None:
    stop = _function(wheels.source("sglang", version), "stop_profile", "not in progress")
    names = {
        "envs": SimpleNamespace(SGLANG_PROFILE_V2=SimpleNamespace(get=lambda: False)),
        "ProfileReqOutput": SimpleNamespace,
    }
    refused = _run(stop, names)(SimpleNamespace(profile_in_progress=False))
    assert refused.success is False and "not in progress" in refused.message


@pytest.mark.parametrize("version", SGLANG)
def test_sglangs_front_end_raises_what_its_schedulers_refuse(version: str) -> None:
    ask = _function(wheels.source("sglang", version), "_execute_profile", "success")

    async def refused(_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(success=False, message="Profiling is not in progress.")]

    with pytest.raises(RuntimeError, match="not in progress"):
        driven(_run(ask, {})(SimpleNamespace(profile_communicator=refused), None))


@pytest.mark.parametrize("version", SGLANG)
def test_sglangs_router_has_no_profiler(version: str) -> None:
    (router,) = _classes(wheels.source("sglang", version), "MultiTokenizerRouter")
    named = {node.name for node in ast.walk(router) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert named and router.bases == [] and not any("profile" in name or "pause" in name for name in named)


@pytest.mark.parametrize("version", VLLM)
def test_vllm_refuses_a_second_start_from_0_32_on(version: str) -> None:
    start = _function(wheels.source("vllm", version) / "vllm/v1/engine", "start_profile", "profile_async")
    refuses = any(isinstance(node, ast.Raise) and "AlreadyActive" in ast.unparse(node) for node in ast.walk(start))
    assert refuses == (tuple(map(int, version.split("."))) >= (0, 32, 0))


# --- reading ----------------------------------------------------------------------------------------------------------


def _trees(folder: Path, word: str) -> Iterator[ast.Module]:
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text("utf-8")
        if word in text:
            yield ast.parse(text)


def _classes(folder: Path, name: str) -> list[ast.ClassDef]:
    nodes = [node for tree in _trees(folder, f"class {name}") for node in tree.body]
    return [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]


def _function(folder: Path, name: str, word: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the only function of this name, with or without a leading `_`, whose source has this word."""
    (found,) = (
        node
        for tree in _trees(folder, f"{name}(")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name in (name, f"_{name}")
        and word in ast.unparse(node)
    )
    return found


def _run(function: ast.FunctionDef | ast.AsyncFunctionDef, names: dict[str, Any]) -> Any:
    """Return the function without its annotations and decorators."""
    function.returns, function.decorator_list = None, []
    for argument in function.args.args:
        argument.annotation = None
    module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
    exec(compile(module, f"<{function.name}>", "exec"), names)
    return names[function.name]
