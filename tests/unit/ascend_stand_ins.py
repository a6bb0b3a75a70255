"""Stand-ins for what tool `npu` calls, since the package itself needs Ascend.

Each stand-in has the signature that torch_npu 2.14.0 has, notes its calls, and writes a file where the package would.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Calls = list[tuple[Any, ...]]


class ExperimentalConfig:
    def __init__(
        self,
        profiler_level: int = 0,
        aic_metrics: int = 1,
        l2_cache: bool = False,
        msprof_tx: bool = False,
        mstx: bool = False,
        data_simplification: bool = True,
        record_op_args: bool = False,
        op_attr: bool = False,
        gc_detect_threshold: float | None = None,
        export_type: str | list[str] = "text",
        host_sys: list[str] | None = None,
        mstx_domain_include: list[str] | None = None,
        mstx_domain_exclude: list[str] | None = None,
        sys_io: bool = False,
        sys_interconnection: bool = False,
    ) -> None:
        self.level, self.excluded = profiler_level, mstx_domain_exclude


class NpuProfile:
    calls: Calls = []

    def __init__(
        self,
        *,
        activities: Iterable[Any] | None = None,
        schedule: Callable[[int], Any] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: Any = None,
        execution_trace_observer: Any = None,
        custom_trace_id_callback: Callable[[], str] | None = None,
        use_cuda: bool | None = None,
    ) -> None:
        self._ready = on_trace_ready
        self.calls.append(("profile", tuple(activities or ()), with_stack, experimental_config.level))

    def start(self) -> None:
        self.calls.append(("start",))

    def step(self) -> None:
        self.calls.append(("step",))

    def stop(self) -> None:
        self.calls.append(("stop",))
        if self._ready is not None:
            self._ready(self)


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[Any], None]:
    def ready(profile: Any) -> None:
        folder = Path(dir_name or ".") / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
        folder.mkdir(parents=True)
        (folder / "ascend_pytorch_profiler_0.db").write_bytes(b"a database")

    return ready


def range_start(message: str, stream: Any = None, domain: str = "default") -> int:
    NpuProfile.calls.append(("range", message))
    return len(NpuProfile.calls)


def range_end(range_id: int, domain: str = "default") -> None:
    NpuProfile.calls.append(("end",))


def npu(patch: pytest.MonkeyPatch) -> Calls:
    """Install a stand-in for torch_npu; return the list of its calls."""
    top, api, core, mstx = (ModuleType(name) for name in ("torch_npu", "profiler", "npu", "mstx"))
    api.__dict__.update(
        profile=NpuProfile,
        tensorboard_trace_handler=tensorboard_trace_handler,
        _ExperimentalConfig=ExperimentalConfig,
        ProfilerActivity=_named(CPU="cpu", NPU="npu"),
        ProfilerLevel=_named(Level_none="none", Level0="0", Level1="1", Level2="2"),
        ExportType=_named(Db="db", Text="text"),
    )
    mstx.__dict__.update(range_start=range_start, range_end=range_end)
    core.__dict__.update(mstx=mstx)
    top.__dict__.update(profiler=api, npu=core)
    patch.setitem(sys.modules, "torch_npu", top)
    patch.setattr(NpuProfile, "calls", [])
    return NpuProfile.calls


def _named(**names: str) -> ModuleType:
    module = ModuleType("names")
    module.__dict__.update(names)
    return module
