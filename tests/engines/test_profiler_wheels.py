"""The stand-ins of torch_npu and msprobe take what the packages' own source takes."""

import ast
import inspect
import tempfile
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
    folders = {requirement: wheels.cache() / requirement.replace("==", "-") for requirement in PARTS}
    for requirement, kept in folders.items():
        if not kept.is_dir():
            wheels.cache().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=wheels.cache()) as folder:
                wheel = wheels.download(requirement, Path(folder))
                wheels.unpack(wheel, Path(folder, "unpacked"), PARTS[requirement])
                Path(folder, "unpacked").rename(kept)
    return folders


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


CASES: list[tuple[str, str, tuple[str, ...], Callable[..., Any]]] = [
    (NPU, "torch_npu/profiler/profiler.py", ("profile", "__init__"), ascend_stand_ins.NpuProfile),
    (
        *(NPU, "torch_npu/profiler/profiler.py", ("tensorboard_trace_handler",)),
        ascend_stand_ins.tensorboard_trace_handler,
    ),
    (
        *(NPU, "torch_npu/profiler/experimental_config.py", ("_ExperimentalConfig", "__init__")),
        ascend_stand_ins.ExperimentalConfig,
    ),
    (NPU, "torch_npu/npu/mstx.py", ("range_start",), ascend_stand_ins.range_start),
    (NPU, "torch_npu/npu/mstx.py", ("range_end",), ascend_stand_ins.range_end),
    (
        *(MSPROBE, "msprobe/pytorch/dump/debugger/precision_debugger.py", ("PrecisionDebugger", "__init__")),
        ascend_stand_ins.Debugger.__init__,
    ),
    *(
        (
            *(MSPROBE, "msprobe/pytorch/dump/debugger/precision_debugger.py", ("PrecisionDebugger", method)),
            getattr(ascend_stand_ins.Debugger, method),
        )
        for method in ("start", "stop", "step")
    ),
]


@pytest.mark.parametrize(("package", "file", "names", "stand_in"), CASES, ids=lambda one: str(one)[-40:])
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
