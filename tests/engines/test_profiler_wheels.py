"""The stand-ins of torch_npu and msprobe take what the packages' own source takes."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines import wheels
from tests.unit import ascend_stand_ins

pytestmark = [pytest.mark.engine_wheels, pytest.mark.timeout(600)]

NPU = "torch-npu==2.14.0"
MSPROBE = "mindstudio-probe==26.2.0"
PARTS = {NPU: ("torch_npu/profiler/", "torch_npu/npu/mstx.py"), MSPROBE: ("msprobe/pytorch/dump/debugger/",)}


@pytest.fixture(scope="module")
def sources() -> dict[str, Path]:
    """Unpacked wheels, in the cache of the other wheels."""
    return {package: wheels.unpacked(package, parts, package.replace("==", "-")) for package, parts in PARTS.items()}


def parameters(file: Path, *names: str) -> list[str]:
    """Of a function, or of a method of a class, in source that is not imported."""
    scope: list[ast.stmt] = ast.parse(file.read_text("utf-8")).body
    found: ast.stmt | None = None
    for name in names:
        found = next(node for node in ast.walk(ast.Module(scope, [])) if getattr(node, "name", None) == name)  # type: ignore[assignment]
        scope = getattr(found, "body", [])
    assert isinstance(found, ast.FunctionDef)
    every = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    return [entry.arg for entry in every if entry.arg not in ("self", "cls")]


TORCH_NPU, DEBUGGER = "torch_npu/profiler", "msprobe/pytorch/dump/debugger/precision_debugger.py"
MSTX, DUMP = "torch_npu/npu/mstx.py", ascend_stand_ins.Debugger
CASES: list[tuple[str, str, tuple[str, ...], Callable[..., Any]]] = [
    (NPU, f"{TORCH_NPU}/profiler.py", ("profile", "__init__"), ascend_stand_ins.NpuProfile),
    (NPU, f"{TORCH_NPU}/profiler.py", ("tensorboard_trace_handler",), ascend_stand_ins.tensorboard_trace_handler),
    (
        NPU,
        f"{TORCH_NPU}/experimental_config.py",
        ("_ExperimentalConfig", "__init__"),
        ascend_stand_ins.ExperimentalConfig,
    ),
    (NPU, MSTX, ("range_start",), ascend_stand_ins.range_start),
    (NPU, MSTX, ("range_end",), ascend_stand_ins.range_end),
    (MSPROBE, DEBUGGER, ("PrecisionDebugger", "__init__"), DUMP.__init__),
    *((MSPROBE, DEBUGGER, ("PrecisionDebugger", name), getattr(DUMP, name)) for name in ("start", "stop", "step")),
]


@pytest.mark.parametrize(("package", "file", "names", "stand_in"), CASES, ids=lambda value: str(value)[-40:])
def test_a_stand_in_takes_what_the_package_takes(
    sources: dict[str, Path], package: str, file: str, names: tuple[str, ...], stand_in: Callable[..., Any]
) -> None:
    ours = [parameter for parameter in inspect.signature(stand_in).parameters if parameter != "self"]
    assert ours == parameters(sources[package] / file, *names)


@pytest.mark.parametrize(
    ("package", "file", "words"),
    [
        (NPU, "torch_npu/profiler/experimental_config.py", ("Level0", "Level1", "Level2", "Level_none", "Db")),
        (MSPROBE, "msprobe/pytorch/dump/debugger/debugger_config.py", ("self.dump_path",)),
        (MSPROBE, "msprobe/pytorch/dump/debugger/precision_debugger.py", ("self.service",)),
    ],
)
def test_the_names_that_are_used_are_there(
    sources: dict[str, Path], package: str, file: str, words: tuple[str, ...]
) -> None:
    text = (sources[package] / file).read_text("utf-8")
    assert [word for word in words if word not in text] == []
