"""The house, checked: who may import whom, which modules stay pure, how large and how named things are.

Each rule is a function from one source file to what is wrong in it; each has a test that runs it over the tree, and bad
snippets in `CAUGHT` that show that it can fail. To move a module into or out of the pure ones, edit `PURE`.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("schemas", "controlplane", "workers")
MOST_LINES, MOST_FUNCTION_LINES = 600, 70

PURE = (
    *("schemas/identity.py", "schemas/commands.py", "schemas/desired.py", "schemas/selection.py"),
    *("schemas/outcomes.py", "schemas/events.py", "schemas/wire.py", "schemas/reports.py", "schemas/formatting.py"),
    *("schemas/config.py", "schemas/errors.py", "schemas/profiler/config.py"),
    *("schemas/profiler/sections.py", "schemas/profiler/interpolation.py"),
    *("schemas/profiler/verl*.py", "schemas/profiler/own_yaml.py"),
    "controlplane/machine/*.py",
    *("controlplane/record/entries.py", "controlplane/record/replay.py", "controlplane/record/invariants.py"),
    *("controlplane/report/model.py", "controlplane/report/histogram.py", "controlplane/report/fleet_history.py"),
    "controlplane/report/collect.py",
    *("controlplane/timeline/alignment.py", "controlplane/timeline/survey.py"),
    *("controlplane/timeline/fleet_tracks.py", "controlplane/timeline/tracks.py"),
    *("workers/machine/*.py", "workers/engine.py", "workers/link/clocks.py"),
)
"""Modules that decide or describe, and never act: no I/O, no clock, no chance. A name may be ahead of its file."""

READERS = ("schemas/profiler/files.py",)
"""What a constructor of a pure module may load on use: it makes the value out of a file."""

PURE_MAY_IMPORT = {
    *("abc", "base64", "binascii", "bisect", "collections", "collections.abc", "contextlib", "copy", "dataclasses"),
    *("difflib", "enum", "functools", "hashlib", "heapq", "itertools", "msgspec", "msgspec.inspect"),
    *("msgspec.json", "msgspec.msgpack", "msgspec.structs", "operator", "re", "string", "struct", "textwrap"),
    *("types", "typing", "zlib"),
}
"""Outside our own packages. Of pathlib, `PurePath` and `PurePosixPath` too: they touch no disk."""

IMPURE_CALLS = {"open", "input", "hash", "id", "vars", "globals", "locals"}

HEAVY = {
    *("torch", "torch_npu", "numpy", "safetensors", "ray", "sglang", "vllm", "aiohttp", "httpx", "fastapi"),
    *("uvicorn", "transformers"),
}
HEAVY_ROOMS = (
    *("workers/engines/*.py", "workers/engines/*/*.py", "workers/profilers/*.py"),
    *("workers/ray_placement.py", "workers/router.py", "controlplane/cli/demo_training.py"),
)
"""Where the optional dependencies are used; nowhere else."""

EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers", "shared"}
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
STRUCT_OPTIONS = {"frozen", "tag", "tag_field", "kw_only", "array_like", "forbid_unknown_fields", "omit_defaults"}
"""Options in a class statement that only Structs have."""


class Source:
    """One file of the tree, or a snippet that stands for one."""

    def __init__(self, path: str, text: str) -> None:
        self.path = PurePosixPath(path)
        self.text = text

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def room(self) -> str:
        """The top directory."""
        return self.path.parts[0]

    def within(self, patterns: tuple[str, ...]) -> bool:
        return any(self.path.match(pattern) for pattern in patterns)


class Wrong(NamedTuple):
    """What is wrong, at which line, and what to do."""

    line: int
    text: str


class Import(NamedTuple):
    """`import module` (name None) or `from module import name`."""

    line: int
    module: str
    name: str | None
    on_use: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


Rule = Callable[[Source], Iterator[Wrong]]


def sources(*rooms: str) -> list[Source]:
    files = sorted(file for room in rooms for file in (ROOT / room).rglob("*.py"))
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files]


def imports(source: Source) -> Iterator[Import]:
    """Every import in the file, relative ones made absolute. On use: in a function, or for type checkers only."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    later = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, functions) or (isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING")
    ]
    inside = {id(part) for node in later for part in ast.walk(node)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, one.name, None, id(node) in inside) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = source.path.parts[: -node.level] if node.level else ()
            module = ".".join((*above, *(node.module.split(".") if node.module else ())))
            yield from (Import(node.lineno, module, one.name, id(node) in inside) for one in node.names)


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; empty for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def called(node: ast.AST) -> str:
    """The dotted name that a call calls."""
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def structs(source: Source) -> Iterator[ast.ClassDef]:
    """Classes that are msgspec Structs: by a base of that name, by a Struct of this file, or by a class option."""
    known = {"Struct", "msgspec.Struct"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and (
            known & {dotted(base) for base in node.bases} or STRUCT_OPTIONS & {option.arg for option in node.keywords}
        ):
            known.add(node.name)
            yield node


# --- the rules --------------------------------------------------------------------------------------------------------


def arrows(source: Source) -> Iterator[Wrong]:
    """schemas <- controlplane, schemas <- workers, no other; controlplane/cli sees both; nobody sees tests or bench."""
    allowed = {"schemas": {"schemas"}, "controlplane": {"controlplane", "schemas"}, "workers": {"workers", "schemas"}}
    sees = set(PRODUCT) if source.path.parts[:2] == ("controlplane", "cli") else allowed[source.room]
    for one in imports(source):
        if one.top in {*PRODUCT, "tests", "bench"} - sees:
            yield Wrong(
                one.line, f"imports {one.module}: put what both sides need in schemas, or hand it in from the cli"
            )


def pure_imports(source: Source) -> Iterator[Wrong]:
    """A pure module imports pure modules and a list of harmless ones."""
    for one in imports(source):
        if one.top in PRODUCT:
            inner = Source(f"{one.module.replace('.', '/')}.py", "")
            deeper = Source(f"{one.module.replace('.', '/')}/{one.name}.py", "")
            reads = one.on_use and inner.within(READERS)
            if not inner.within(PURE) and not deeper.within(PURE) and not reads:
                yield Wrong(one.line, f"imports {one.module}, which is not pure: take it as an argument or event")
        elif one.module == "pathlib" and one.name in {"PurePath", "PurePosixPath"}:
            continue
        elif one.module not in PURE_MAY_IMPORT:
            yield Wrong(one.line, f"imports {one.module}: a shell does that; time, ids and chance come with events")


def pure_expressions(source: Source) -> Iterator[Wrong]:
    """No float, nothing that differs from process to process, no order taken from a set."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield Wrong(node.lineno, f"float {node.value}: count in a unit that is whole (ms, ns, per mille)")
        elif called(node) in IMPURE_CALLS and isinstance(node, ast.Call):
            yield Wrong(node.lineno, f"calls {called(node)}(): its answer differs from process to process")
        for ordered in taken_in_order(node):
            if isinstance(ordered, ast.Set | ast.SetComp) or called(ordered) in {"set", "frozenset"}:
                yield Wrong(ordered.lineno, "takes the order of a set, which differs from process to process: sort it")


def taken_in_order(node: ast.AST) -> Iterator[ast.expr]:
    """What this node walks through in an order that shows."""
    if isinstance(node, ast.For | ast.comprehension):
        yield node.iter
    elif isinstance(node, ast.Starred):
        yield node.value
    elif called(node) in {"list", "tuple", "enumerate", "iter"} or called(node).endswith(".join"):
        assert isinstance(node, ast.Call)
        yield from node.args


def file_size(source: Source) -> Iterator[Wrong]:
    """No file over 600 lines."""
    lines = source.text.count("\n")
    if lines > MOST_LINES:
        yield Wrong(lines, f"{lines} lines, of at most {MOST_LINES}: two reasons to change are two files")


def function_size(source: Source) -> Iterator[Wrong]:
    """No function over 70 lines, its docstring counted."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                yield Wrong(
                    node.lineno, f"{node.name} has {lines} lines, at most {MOST_FUNCTION_LINES}: name its parts"
                )


def names(source: Source) -> Iterator[Wrong]:
    """A file or directory is the noun it holds."""
    for part in (*source.path.parts[:-1], source.path.stem):
        if EMPTY_NAMES & {part, *part.split("_")}:
            yield Wrong(1, f"`{part}` says nothing: name it for what it holds")


def struct_annotations(source: Source) -> Iterator[Wrong]:
    """msgspec resolves annotations when it builds a codec: they have to be there."""
    defines = any(True for _ in structs(source))
    for one in imports(source):
        if defines and (one.module, one.name) == ("__future__", "annotations"):
            yield Wrong(one.line, "postpones annotations that msgspec needs: delete the import")


def struct_fields(source: Source) -> Iterator[Wrong]:
    """A Struct field says what it holds."""
    for struct in structs(source):
        for field in struct.body:
            if isinstance(field, ast.AnnAssign):
                parts = {dotted(part) for part in ast.walk(field.annotation) if isinstance(part, ast.expr)}
                if parts & {"Any", "typing.Any"}:
                    yield Wrong(
                        field.lineno, f"a field of {struct.name} is Any: give its type, or msgspec.Raw to defer it"
                    )


def safe_loading(source: Source) -> Iterator[Wrong]:
    """Bytes from elsewhere never become code."""
    for one in imports(source):
        if one.top in UNSAFE_MODULES:
            yield Wrong(one.line, f"imports {one.module}: load safetensors, json or msgspec, which can't run code")
        elif f"{one.module}.{one.name}" in UNSAFE_CALLS:
            yield Wrong(one.line, f"imports {one.module}.{one.name}, which can run what it reads")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and called(node) in UNSAFE_CALLS:
            yield Wrong(node.lineno, f"calls {called(node)}, which can run what it reads: use safetensors or json")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", None) is True:
            yield Wrong(node.value.lineno, "allows objects in an array file, which can run code: leave them refused")


def no_sleeping(source: Source) -> Iterator[Wrong]:
    """Nobody sleeps: neither a shell, which would block its loop, nor a test, which would be slow and still flaky."""
    clocks = {"time"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            clocks |= {one.asname or one.name for one in node.names if one.name == "time"}
    advice = "sleeps: wait for the event itself with a deadline, or move a clock that the test owns"
    for one in imports(source):
        if (one.module, one.name) == ("time", "sleep"):
            yield Wrong(one.line, advice)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and called(node) in {f"{clock}.sleep" for clock in clocks}:
            yield Wrong(node.lineno, advice)


def heavy_imports(source: Source) -> Iterator[Wrong]:
    """Optional dependencies stay in their rooms, and load when they are used."""
    entrance = source.path.name == "__init__.py"
    for one in imports(source):
        if one.top in HEAVY and not source.within(HEAVY_ROOMS):
            yield Wrong(one.line, f"imports {one.module}: only {', '.join(HEAVY_ROOMS)} may")
        elif one.top in HEAVY and entrance and not one.on_use:
            yield Wrong(one.line, f"loads {one.module} when it is loaded itself: import it where it is used")


def rooms_on_use(source: Source) -> Iterator[Wrong]:
    """Who names a room of an optional dependency loads it on use, or the dependency is optional no more."""
    for one in imports(source):
        inner = f"{one.module.replace('.', '/')}"
        heavy = any(Source(f"{path}.py", "").within(HEAVY_ROOMS) for path in (inner, f"{inner}/{one.name}"))
        if heavy and not one.on_use and not source.within(HEAVY_ROOMS) and needs_extra(inner, one.name):
            yield Wrong(one.line, f"loads {one.module} when it is loaded itself: import it where it is used")


def needs_extra(path: str, name: str | None) -> bool:
    """Whether a room of ours imports an optional dependency as soon as it is imported. What is not there does."""
    package = () if name is not None else (ROOT / path / "__init__.py",)
    for file in (ROOT / f"{path}/{name}.py", ROOT / f"{path}.py", *package):
        if file.is_file():
            source = Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
            return any(one.top in HEAVY and not one.on_use for one in imports(source))
    return True


# --- over the tree ----------------------------------------------------------------------------------------------------


def hold(rule: Rule, files: list[Source]) -> None:
    """Fail with one line for each thing that is wrong."""
    assert files, "no files found: is this a checkout?"
    wrong = [f"{source.path}:{one.line}: {one.text}" for source in files for one in rule(source)]
    assert not wrong, "\n".join([f"{rule.__doc__}", *wrong])


def pure() -> list[Source]:
    return [source for source in sources(*PRODUCT) if source.within(PURE)]


def test_imports_follow_the_arrows() -> None:
    hold(arrows, sources(*PRODUCT))


def test_pure_modules_import_nothing_that_acts() -> None:
    hold(pure_imports, pure())


def test_pure_modules_say_the_same_in_every_process() -> None:
    hold(pure_expressions, pure())


def test_no_file_is_too_long() -> None:
    hold(file_size, sources(*PRODUCT, "tests", "bench"))


def test_no_function_is_too_long() -> None:
    hold(function_size, sources(*PRODUCT, "tests", "bench"))


def test_every_file_is_named_for_what_it_holds() -> None:
    hold(names, sources(*PRODUCT, "tests", "bench"))


def test_structs_keep_their_annotations() -> None:
    hold(struct_annotations, sources(*PRODUCT))


def test_no_struct_field_is_any() -> None:
    hold(struct_fields, sources(*PRODUCT))


def test_nothing_that_is_loaded_can_run_code() -> None:
    hold(safe_loading, sources(*PRODUCT))


def test_nobody_sleeps() -> None:
    hold(no_sleeping, sources(*PRODUCT, "tests"))


def test_optional_dependencies_stay_in_their_rooms() -> None:
    hold(heavy_imports, sources(*PRODUCT))


def test_rooms_of_optional_dependencies_are_entered_on_use() -> None:
    hold(rooms_on_use, sources(*PRODUCT))


# --- the rules can fail -----------------------------------------------------------------------------------------------

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MOST_FUNCTION_LINES
CAUGHT: list[tuple[Rule, str, str, str]] = [
    (arrows, "schemas/wire.py", "from workers.machine.decide import decide", "workers.machine.decide"),
    (arrows, "workers/agent.py", "def f():\n    import controlplane.record.log", "controlplane.record.log"),
    (arrows, "controlplane/bus/bus.py", "if TYPE_CHECKING:\n    from workers import machine", "imports workers"),
    (arrows, "controlplane/cli/demo.py", "from tests.conftest import LOOPS", "tests.conftest"),
    (arrows, "workers/machine/a.py", "from ...controlplane import log", "controlplane"),
    (pure_imports, "workers/machine/decide.py", "import time", "imports time"),
    (pure_imports, "workers/machine/decide.py", "from os import path", "imports os"),
    (pure_imports, "workers/machine/decide.py", "from pathlib import Path", "imports pathlib"),
    (pure_imports, "workers/machine/decide.py", "def f():\n    import random", "imports random"),
    (pure_imports, "workers/machine/decide.py", "from schemas.carriers.sockets import Socket", "not pure"),
    (pure_imports, "workers/machine/decide.py", "from schemas import records", "not pure"),
    (pure_imports, "workers/machine/a.py", "from ..agent import Agent", "workers.agent"),
    (pure_imports, "schemas/config.py", "from schemas.profiler.files import read_yaml", "not pure"),
    (pure_expressions, "workers/machine/decide.py", "x = 0.5", "float"),
    (pure_expressions, "workers/machine/decide.py", "x = hash('a')", "hash()"),
    (pure_expressions, "workers/machine/decide.py", "for x in {1, 2}: pass", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = [y for y in set(z)]", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = tuple({y for y in z})", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = ','.join(frozenset(z))", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = (*set(z),)", "sort it"),
    (file_size, "workers/agent.py", "x = 1\n" * (MOST_LINES + 1), "601 lines"),
    (function_size, "workers/agent.py", LONG_FUNCTION, "f has 71 lines"),
    (function_size, "workers/agent.py", LONG_FUNCTION.replace("def", "async def"), "f has 71 lines"),
    (names, "workers/utils.py", "", "`utils`"),
    (names, "controlplane/fleet_manager.py", "", "`fleet_manager`"),
    (names, "tests/common/a.py", "", "`common`"),
    (struct_annotations, "schemas/a.py", "from __future__ import annotations\nclass A(Struct): ...", "postpones"),
    (struct_annotations, "schemas/a.py", "from __future__ import annotations\nclass A(B, tag='a'): ...", "postpones"),
    (struct_fields, "schemas/a.py", "class A(msgspec.Struct):\n    x: dict[str, Any]", "field of A"),
    (struct_fields, "schemas/a.py", "class A(Struct):\n    x: int\nclass B(A):\n    y: typing.Any = 1", "field of B"),
    (safe_loading, "workers/a.py", "import pickle", "pickle"),
    (safe_loading, "workers/a.py", "from cloudpickle import loads", "cloudpickle"),
    (safe_loading, "workers/a.py", "eval('1')", "eval"),
    (safe_loading, "workers/a.py", "torch.load(path, weights_only=True)", "torch.load"),
    (safe_loading, "workers/a.py", "from torch import load", "torch.load"),
    (safe_loading, "workers/a.py", "yaml.load(text)", "yaml.load"),
    (safe_loading, "workers/a.py", "numpy.load(path, allow_pickle=True)", "array file"),
    (no_sleeping, "tests/a.py", "from time import sleep", "sleeps"),
    (no_sleeping, "tests/a.py", "import time as clock\nclock.sleep(1)", "sleeps"),
    (heavy_imports, "workers/agent.py", "def f():\n    import torch.cuda", "torch.cuda"),
    (heavy_imports, "schemas/wire.py", "from numpy import array", "numpy"),
    (heavy_imports, "workers/engines/__init__.py", "import sglang", "where it is used"),
    (heavy_imports, "controlplane/cli/demo.py", "import torch", "only"),
    (rooms_on_use, "controlplane/cli/demo.py", "import controlplane.cli.demo_training", "where it is used"),
    (rooms_on_use, "workers/agent.py", "from workers.engines.not_there import Engine", "where it is used"),
    (rooms_on_use, "workers/agent.py", "from workers.engines import not_there", "where it is used"),
]
PASSED: list[tuple[Rule, str, str]] = [
    (arrows, "controlplane/cli/demo.py", "from workers.agent import Agent\nimport controlplane.bus.bus, schemas.wire"),
    (arrows, "workers/agent.py", "from .machine import decide\nimport zmq"),
    (
        pure_imports,
        "workers/machine/decide.py",
        "from pathlib import PurePosixPath\nfrom collections.abc import Callable",
    ),
    (
        pure_imports,
        "controlplane/machine/coordinator.py",
        "from controlplane.machine import fleet\nfrom schemas.wire import encode",
    ),
    (pure_imports, "workers/machine/a.py", "from .reconcile import reconcile\nfrom workers.machine import reconcile"),
    (pure_imports, "schemas/config.py", "def f():\n    from schemas.profiler.files import read_yaml"),
    (
        pure_expressions,
        "workers/machine/decide.py",
        "x = sorted({1, 2})\ny = 1 in {1, 2}\nfor z in sorted(set(x)): pass",
    ),
    (file_size, "workers/agent.py", "x = 1\n" * MOST_LINES),
    (function_size, "workers/agent.py", LONG_FUNCTION.replace("    x = 1\n", "", 1)),
    (names, "schemas/commands.py", ""),
    (struct_annotations, "workers/agent.py", "from __future__ import annotations\nclass A(Plain): ..."),
    (struct_fields, "schemas/a.py", "class A(Struct):\n    x: Raw\nclass B(Plain):\n    y: Any"),
    (safe_loading, "workers/a.py", "import re\nre.compile('a')\nsafetensors.torch.load_file(path)"),
    (no_sleeping, "tests/a.py", "import anyio\nasync def f():\n    await anyio.sleep(0)"),
    (heavy_imports, "workers/engines/tiny/engine.py", "import torch"),
    (heavy_imports, "controlplane/cli/demo_training.py", "import torch"),
    (rooms_on_use, "workers/agent.py", "def f():\n    from workers.engines.not_there import Engine"),
]


@pytest.mark.parametrize(("rule", "path", "snippet", "says"), CAUGHT)
def test_each_rule_catches_what_it_is_there_for(rule: Rule, path: str, snippet: str, says: str) -> None:
    wrong = list(rule(Source(path, snippet)))
    assert [one for one in wrong if says in one.text], f"{rule.__name__} let this pass: {snippet}"


@pytest.mark.parametrize(("rule", "path", "snippet"), PASSED)
def test_each_rule_lets_good_code_pass(rule: Rule, path: str, snippet: str) -> None:
    assert list(rule(Source(path, snippet))) == []


def test_every_rule_has_been_seen_to_fail_and_to_pass() -> None:
    rules = {rule.__name__ for rule, *_ in CAUGHT}
    assert rules == {rule.__name__ for rule, *_ in PASSED}
    wanted = "Iterator[Wrong]"
    written = {
        node.name
        for node in ast.parse(Path(__file__).read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == wanted
    }
    assert rules == written
