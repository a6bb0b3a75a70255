"""The parts of verl 0.9.1 that decide who profiles, taken from its wheel and run over stand-ins for what they call.

Its profiling modules are imported unchanged. The servers need Ray and an engine to be imported, so only their two
methods are taken, and the lines of `__init__` that build what these read; of the trainers, the lines that decide for
which steps anything is sent. None of this code is kept in this repository.

    trainer (its lines) ──▶ server (its methods) ──▶ a stand-in for SGLang's or vLLM's front end
                       └──▶ DistProfiler (its module) ──▶ the tool's module ──▶ a tool that notes its calls
"""

import ast
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.engines import wheels

VERSION = "0.9.1"
PARTS = ("verl/base_config.py", "verl/trainer/ppo/v1/", "verl/utils/", "verl/workers/rollout/")
TRAINER = "verl/trainer/ppo/v1/trainer_base.py"
SYNC_TRAINER = "verl/trainer/ppo/v1/trainer_sync.py"
SERVERS = {
    "sglang": ("verl/workers/rollout/sglang_rollout/async_sglang_server.py", "SGLangHttpServer"),
    "vllm": ("verl/workers/rollout/vllm_rollout/vllm_async_server.py", "vLLMHttpServer"),
}


def source() -> Path:
    """Return the unpacked part of the wheel, fetched first if necessary. Raises RuntimeError, which quotes pip."""
    kept = wheels.cache() / f"verl-{VERSION}"
    if kept.is_dir():
        return kept
    wheels.cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheels.cache(), prefix=f".verl-{VERSION}-") as folder:
        unpacked = Path(folder, "unpacked")
        wheels.unpack(wheels.download(f"verl=={VERSION}", Path(folder)), unpacked, PARTS)
        try:
            unpacked.rename(kept)
        except OSError:
            if not kept.is_dir():  # otherwise another process was faster, with the same files
                raise
    return kept


# --- its modules ------------------------------------------------------------------------------------------------------


class Tools:
    """The calls that the tools of a training rank receive, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def noting(self, *names: object) -> Callable[..., None]:
        """Return a function that notes its call."""

        def note(*arguments: object, **_: object) -> None:
            self.calls.append((*names, *(argument for argument in arguments if isinstance(argument, str))))

        return note

    def profiler(self, name: str, **options: object) -> SimpleNamespace:
        """Return a profiler object, torch's or torch_npu's. Its role and step tell one session from another."""
        session = {key: value for key, value in options.items() if key in ("role", "profile_step")}
        return SimpleNamespace(
            start=self.noting(name, "start", str(session)), stop=self.noting(name, "stop"), step=lambda: None
        )


class Verl:
    """verl's profiling modules, and the tools that they call."""

    def __init__(self, modules: dict[str, ModuleType], tools: Tools) -> None:
        self.config, self.profile = modules["config"], modules["profile"]
        self.torch, self.npu = modules["torch_profile"], modules["mstx_profile"]
        self.to_dataclass = modules["omegaconf"].omega_conf_to_dataclass
        self.tools = tools

    def options(self, tool: str | None, discrete: bool, window: tuple[int, int] | None = None) -> Any:
        """Return `tool_config` of one tool, as its dataclass."""
        start, end = window or (None, None)
        tokens = {"profile_token_start": start, "profile_token_end": end}
        match tool:
            case "torch":
                return self.config.TorchProfilerToolConfig(discrete=discrete, **tokens)
            case "npu":
                return self.config.NPUToolConfig(discrete=discrete, **tokens)
            case "nsys":
                return self.config.NsightToolConfig(discrete=discrete)
            case "torch_memory":
                return self.config.TorchMemoryToolConfig()
            case "precision_debugger":
                return self.config.PrecisionDebuggerToolConfig(config_path="msprobe.json")
            case _:
                return None

    def section(self, tool: str | None, enable: bool, ranks: list[int] | None, options: Any, save: Path) -> Any:
        """Return a role's section, as its dataclass. `ranks` is None for all."""
        return self.config.ProfilerConfig(
            tool=tool,
            enable=enable,
            all_ranks=ranks is None,
            ranks=ranks or [],
            save_path=str(save),
            tool_config={tool: options},
        )

    def forget(self) -> None:
        """Reset what the modules keep for the life of a process."""
        self.torch.Profiler._define_count = self.npu.NPUProfiler._define_count = 0
        self.torch.Profiler._active_prof = None
        self.tools.calls.clear()


def _package(name: str, folder: Path) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    return package


def _module(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def _untouched(*_: object, **__: object) -> Callable[[Any], Any]:
    return lambda function: function


@contextmanager
def imported(root: Path) -> Iterator[Verl]:
    """Import verl's profiling modules from `root` over stand-ins; remove them afterwards."""
    from importlib import import_module

    tools = Tools()
    npu = _module(
        "torch_npu",
        __version__="2.7",
        __path__=[],
        profiler=SimpleNamespace(
            ProfilerLevel=SimpleNamespace(Level0=0),
            ProfilerActivity=SimpleNamespace(CPU=0, NPU=1),
            ExportType=SimpleNamespace(Db=0),
            _ExperimentalConfig=lambda **_: None,
            tensorboard_trace_handler=lambda *_, **__: None,
            profile=lambda **_: tools.profiler("npu"),
        ),
    )
    platform = SimpleNamespace(profiler_start=tools.noting("nsys", "start"), profiler_stop=tools.noting("nsys", "stop"))
    sampler = SimpleNamespace(dump_memory_snapshot=lambda **options: tools.calls.append(("memory", options["sub_dir"])))
    debugger = SimpleNamespace(start=tools.noting("msprobe", "start"), stop=tools.noting("msprobe", "stop"))
    marks = {"start_range": lambda **_: 0, "end_range": lambda _: None}
    given = {
        "verl": _package("verl", root / "verl"),
        "verl.utils": _package("verl.utils", root / "verl" / "utils"),
        "verl.utils.profiler": _package("verl.utils.profiler", root / "verl" / "utils" / "profiler"),
        "verl.utils.tracking": _module("", RLInsightLogger=SimpleNamespace(trace_state=lambda *_, **__: nullcontext())),
        "verl.utils.device": _module("", get_device_name=lambda: "cpu", get_torch_device=lambda: None),
        "verl.utils.memory_utils": _module(
            "",
            MemorySnapshotSampler=lambda: sampler,
            clear_memory_history=lambda **_: None,
            enable_memory_visualize=lambda **_: None,
            get_memory_info=lambda: None,
        ),
        "verl.utils.import_utils": _module("", is_msprobe_available=lambda: True),
        "verl.plugin": _module("verl.plugin", __path__=[]),
        "verl.plugin.platform": _module("", get_platform=lambda: platform),
        "verl.single_controller": _module("", __path__=[]),
        "verl.single_controller.base": _module("", __path__=[]),
        "verl.single_controller.base.decorator": _module(
            "", Dispatch=SimpleNamespace(ONE_TO_ALL=0), register=_untouched
        ),
        "nvtx": _module("nvtx", annotate=_untouched, **marks),
        "torch_npu": npu,
        "torch_npu.npu": _module("", mstx=SimpleNamespace(mstx_range=_untouched, range_start=lambda **_: 0)),
        "msprobe": _module("", __path__=[]),
        "msprobe.pytorch": _module(
            "",
            PrecisionDebugger=lambda config_path, dump_path: SimpleNamespace(
                start=lambda _: tools.calls.append(("msprobe", "start", dump_path)), stop=debugger.stop
            ),
        ),
    }
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "verl" or name in given}
    for name in before:
        del sys.modules[name]
    sys.modules.update(given)
    try:
        names = ("config", "profile", "torch_profile", "mstx_profile", "nvtx_profile", "torch_memory_profile")
        modules = {name: import_module(f"verl.utils.profiler.{name}") for name in names}
        modules["omegaconf"] = import_module("verl.utils.config")
        vars(modules["torch_profile"])["get_torch_profiler"] = lambda **options: tools.profiler("torch", **options)
        for name in ("nvtx_profile", "mstx_profile"):
            vars(modules[name]).update(mark_start_range=lambda **_: 0, mark_end_range=lambda _: None)
        yield Verl(modules, tools)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl" or name in given]:
            del sys.modules[name]
        sys.modules.update(before)


# --- its servers and trainers ----------------------------------------------------------------------------------------


def _methods(file: Path, kind: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == kind:
            return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    raise LookupError(f"{file} has no class {kind}: this is not verl {VERSION}")


def _sets(statement: ast.stmt, target: str) -> bool:
    return isinstance(statement, ast.Assign) and any(ast.unparse(name) == target for name in statement.targets)


def _lines(body: list[ast.stmt], first: str, last: str) -> list[ast.stmt]:
    """The statements from the assignment of `first` to that of `last`."""
    begin = next(number for number, statement in enumerate(body) if _sets(statement, first))
    end = next(number for number in range(begin, len(body)) if _sets(body[number], last))
    return body[begin : end + 1]


def _class(name: str, methods: list[ast.stmt], names: dict[str, Any]) -> Any:
    node = ast.ClassDef(name=name, bases=[], keywords=[], body=methods, decorator_list=[])
    module = ast.fix_missing_locations(ast.Module(body=[node], type_ignores=[]))
    exec(compile(module, f"<verl {VERSION}: {name}>", "exec"), names)
    return names[name]


def _function(name: str, body: list[ast.stmt]) -> ast.FunctionDef:
    (node,) = ast.parse(f"def {name}(self): pass").body
    assert isinstance(node, ast.FunctionDef)
    node.body = body
    return node


def server_class(engine: str, verl: Verl, warnings: list[str]) -> Any:
    """Return a class with `start_profile`, `stop_profile`, and `configure`: what `__init__` does for the two."""
    path, kind = SERVERS[engine]
    methods = _methods(source() / path, kind)
    lines = _lines(methods["__init__"].body, "profiler_config", "self.profiler_keep_global_ranks")
    wanted = [methods[name] for name in ("start_profile", "stop_profile", "_should_profile") if name in methods]
    names: dict[str, Any] = {
        "omega_conf_to_dataclass": verl.to_dataclass,
        "logger": SimpleNamespace(warning=warnings.append),
        "build_rollout_dist_profiler": verl.profile.build_rollout_dist_profiler,
    }
    for name in ("build_sglang_profiler_args", "relocate_rollout_traces", "rollout_profiler_global_ranks"):
        names[name] = getattr(verl.config, name)
    return _class(kind, [*wanted, _function("configure", lines)], names)


def trainer_class() -> Any:
    """Return a class with the decisions of a step: `choose`, `_start_profiling`, `_stop_profiling`, `on_sample_end`."""
    methods = _methods(source() / TRAINER, "PPOTrainer")
    (choosing,) = (
        node
        for node in ast.walk(methods["fit"])
        if isinstance(node, ast.Assign)
        and _sets(node, "self.curr_step_profile")
        and "global_profiler" in ast.unparse(node.value)
    )
    names = ("_rollout_server_managers", "_start_rollout_profiling", "_stop_rollout_profiling")
    wanted: list[ast.stmt] = [methods[name] for name in (*names, "_start_profiling", "_stop_profiling")]
    ending = _methods(source() / SYNC_TRAINER, "PPOTrainerSync")["on_sample_end"]
    return _class("PPOTrainer", [*wanted, ending, _function("choose", [choosing])], {})


def driven(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that never waits to its end."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("the coroutine waits")
