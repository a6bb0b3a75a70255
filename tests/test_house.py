"""The rules of the house, checked: what may import what, which modules stay pure, how large and how named things are.

A rule is a function from source files to what is wrong in them. Each has a test that runs it over the tree, and bad
snippets in `CAUGHT` which show that it can fail. To move a module into or out of the pure ones, edit `PURE`.
"""

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.source_files import ROOT, Source, called, dotted, imports, sources, structs

pytestmark = pytest.mark.xdist_group("house")  # in one process, which parses each file once

PRODUCT = ("schemas", "controlplane", "workers")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 70
MAX_PRODUCT_LINES = 46_200
"""Lines of the product, with comments. Raised only on purpose, in a commit of its own that says what is worth it."""

PURE = (
    *("schemas/identity.py", "schemas/commands.py", "schemas/desired.py", "schemas/selection.py"),
    *("schemas/outcomes.py", "schemas/events.py", "schemas/wire.py", "schemas/reports.py", "schemas/formatting.py"),
    *("schemas/config.py", "schemas/errors.py", "schemas/agent_status.py", "schemas/profiler/[cs]*.py"),
    *("schemas/profiler/conversion.py", "schemas/profiler/verl*.py", "controlplane/machine/*.py"),
    *("controlplane/record/entries.py", "controlplane/record/marks.py", "controlplane/replay/replayer.py"),
    *("controlplane/analysis/*.py", "controlplane/report/model.py", "controlplane/report/fleet_history.py"),
    *("controlplane/report/causes.py", "controlplane/report/collect.py", "controlplane/report/game_day.py"),
    "controlplane/timeline/survey.py",
    *("controlplane/timeline/fleet_tracks.py", "controlplane/timeline/tracks.py"),
    "controlplane/trainers/gateway/routes.py",
    *("workers/machine/*.py", "workers/engine.py", "workers/link/clocks.py"),
)
"""Modules that decide or describe, and never act: no I/O, no clock, no random number."""

READERS = ("schemas/profiler/readers.py",)
"""What a constructor of a pure module may import inside a function: it builds the value from a file."""
PURE_MAY_IMPORT = {
    *("abc", "base64", "binascii", "bisect", "collections", "collections.abc", "contextlib", "copy", "dataclasses"),
    *("difflib", "enum", "functools", "hashlib", "heapq", "html", "itertools", "msgspec", "msgspec.inspect"),
    *("array", "msgspec.json", "msgspec.msgpack", "msgspec.structs", "operator", "re", "string", "struct", "textwrap"),
    *("tomllib", "types", "typing", "zlib"),
}
"""Modules from outside our packages. `PurePath` and `PurePosixPath` are allowed too: they touch no disk."""

IMPURE_CALLS = {"open", "input", "hash", "id", "vars", "globals", "locals"}

COMPOSITION_ROOTS = {("controlplane", "cli"), ("controlplane", "trainers"), ("controlplane", "simulate")}
"""What sees both sides: the command line, the doors of trainers, and the simulator, which runs both machines."""

HEAVY = {
    *("torch", "torch_npu", "numpy", "safetensors", "ray", "sglang", "vllm", "aiohttp", "httpcore", "httpx"),
    *("fastapi", "uvicorn", "starlette", "transformers", "verl", "trl", "prometheus_client", "opentelemetry"),
}
HEAVY_ROOMS = (
    *("workers/engines/*.py", "workers/engines/*/*.py", "workers/profilers/*.py"),
    *("workers/ray_placement.py", "workers/router.py", "controlplane/cli/demo_training.py"),
    "workers/conformance/server_client.py",
    *("controlplane/trainers/*.py", "controlplane/trainers/*/*.py"),
    *("controlplane/metrics.py", "controlplane/spans.py", "workers/exporter.py", "schemas/transport/exposition.py"),
)
"""The only places that may use the optional dependencies."""

SHARED_FILE_NAMES = {"__init__", "__main__"}
SHARED_NAME_ROOMS = (
    *("controlplane/cli/*.py", "workers/engines/*/*.py"),  # a command, or an engine's part, is named like its subject
    *("controlplane/trainers/*.py", "controlplane/trainers/*/*.py"),  # and so is a trainer's part
    *("schemas/commands.py", "schemas/events.py", "schemas/config.py"),  # the contract that a side adds to
    "workers/shadowing.py",  # neither side may import the other's
)
"""Files whose folder says what they are, so that their name may occur elsewhere."""

EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers", "shared"}
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
PUBLIC = frozenset(re.findall(r"`(\w+)`", (ROOT / "docs" / "public-api.md").read_text("utf-8")))
"""Classes and functions that users may rely on."""
_UNPLAIN = "nobody|anybody|somebody|everybody|everyone|whoever|whom|is to be had|gone on with|made anew|by and by"
UNPLAIN = re.compile(rf"\b(?:{_UNPLAIN})\b", re.I)
"""Words for persons, where the product speaks of processes, and idioms that need a second reading."""


class Wrong(NamedTuple):
    """What is wrong, where, and what to do."""

    source: Source
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}: {self.text}"


Rule = Callable[[Source], Iterator[Wrong]]
TreeRule = Callable[[list[Source]], Iterator[Wrong]]


# --- rules for one file -----------------------------------------------------------------------------------------------


def arrows(source: Source) -> Iterator[Wrong]:
    """schemas <- controlplane, schemas <- workers, and no other; COMPOSITION_ROOTS see both; none imports tests."""
    allowed = {"schemas": {"schemas"}, "controlplane": {"controlplane", "schemas"}, "workers": {"workers", "schemas"}}
    sees = set(PRODUCT) if source.path.parts[:2] in COMPOSITION_ROOTS else allowed[source.room]
    for found in imports(source):
        if found.top in {*PRODUCT, "tests", "bench"} - sees:
            advice = "put what both sides need in schemas, or pass it in from cli or trainers"
            yield Wrong(source, found.line, f"imports {found.module}: {advice}")


def pure_imports(source: Source) -> Iterator[Wrong]:
    """A pure module imports pure modules, and harmless ones from a list."""
    for found in imports(source):
        if found.top in PRODUCT:
            inner = Source(f"{found.module.replace('.', '/')}.py", "")
            deeper = Source(f"{found.module.replace('.', '/')}/{found.name}.py", "")
            reads = found.on_use and inner.within(READERS)
            if not inner.within(PURE) and not deeper.within(PURE) and not reads:
                text = f"imports {found.module}, which is not pure: take it as an argument or event"
                yield Wrong(source, found.line, text)
        elif found.module == "pathlib" and found.name in {"PurePath", "PurePosixPath"}:
            continue
        elif found.module not in PURE_MAY_IMPORT:
            text = f"imports {found.module}: a shell does that; time, ids and random numbers come with events"
            yield Wrong(source, found.line, text)


def pure_expressions(source: Source) -> Iterator[Wrong]:
    """No float, nothing that differs between processes, and no order taken from a set."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield Wrong(source, node.lineno, f"float {node.value}: count in whole units (ms, ns, per mille)")
        elif called(node) in IMPURE_CALLS and isinstance(node, ast.Call):
            yield Wrong(source, node.lineno, f"calls {called(node)}(): its result differs between processes")
        for iterated in iterated_by(node):
            if isinstance(iterated, ast.Set | ast.SetComp) or called(iterated) in {"set", "frozenset"}:
                yield Wrong(
                    source, iterated.lineno, "uses the order of a set, which differs between processes: sort it"
                )


def iterated_by(node: ast.AST) -> Iterator[ast.expr]:
    """What this node iterates over in an order that shows in its result."""
    if isinstance(node, ast.For | ast.comprehension):
        yield node.iter
    elif isinstance(node, ast.Starred):
        yield node.value
    elif called(node) in {"list", "tuple", "enumerate", "iter"} or called(node).endswith(".join"):
        assert isinstance(node, ast.Call)
        yield from node.args


def file_size(source: Source) -> Iterator[Wrong]:
    """No file is over 600 lines."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        text = f"{lines} lines, of at most {MAX_FILE_LINES}: a file with two reasons to change is two files"
        yield Wrong(source, lines, text)


def function_size(source: Source) -> Iterator[Wrong]:
    """No function is over 70 lines, with its docstring."""
    for node in statements(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                text = f"{node.name} has {lines} lines, of at most {MAX_FUNCTION_LINES}: name its parts"
                yield Wrong(source, node.lineno, text)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below a node; without the expressions, which are most of a tree."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt):
            yield inner
            yield from statements(inner)


def names(source: Source) -> Iterator[Wrong]:
    """A file or directory is named for what it holds."""
    for part in (*source.path.parts[:-1], source.path.stem):
        if EMPTY_NAMES & {part, *part.split("_")}:
            yield Wrong(source, 1, f"`{part}` says nothing: name it for what it holds")


def struct_annotations(source: Source) -> Iterator[Wrong]:
    """A file with Structs doesn't postpone annotations: msgspec needs them when it builds a codec."""
    defines = any(True for _ in structs(source))
    for found in imports(source):
        if defines and (found.module, found.name) == ("__future__", "annotations"):
            yield Wrong(source, found.line, "postpones annotations that msgspec needs: delete the import")


def struct_fields(source: Source) -> Iterator[Wrong]:
    """No Struct field is Any."""
    for struct in structs(source):
        for field in struct.body:
            if isinstance(field, ast.AnnAssign):
                parts = {dotted(part) for part in ast.walk(field.annotation) if isinstance(part, ast.expr)}
                if parts & {"Any", "typing.Any"}:
                    text = f"a field of {struct.name} is Any: give its type, or msgspec.Raw to defer decoding"
                    yield Wrong(source, field.lineno, text)


def safe_loading(source: Source) -> Iterator[Wrong]:
    """Bytes from elsewhere never become code."""
    for found in imports(source):
        if found.top in UNSAFE_MODULES:
            text = f"imports {found.module}: load safetensors, json or msgspec, which can't run code"
            yield Wrong(source, found.line, text)
        elif f"{found.module}.{found.name}" in UNSAFE_CALLS:
            yield Wrong(source, found.line, f"imports {found.module}.{found.name}, which can run what it reads")
    for node in source.nodes:
        if isinstance(node, ast.Call) and called(node) in UNSAFE_CALLS:
            text = f"calls {called(node)}, which can run what it reads: use safetensors or json"
            yield Wrong(source, node.lineno, text)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", None) is True:
            yield Wrong(source, node.value.lineno, "allows objects in an array file, which can run code: refuse them")


def no_sleeping(source: Source) -> Iterator[Wrong]:
    """No code calls time.sleep: it blocks a shell's loop, and makes a test slow and still flaky."""
    if "sleep" not in source.text:
        return
    clocks = {"time"}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            clocks |= {alias.asname or alias.name for alias in node.names if alias.name == "time"}
    advice = "sleeps: wait for the event itself with a deadline, or move a clock that the test owns"
    for found in imports(source):
        if (found.module, found.name) == ("time", "sleep"):
            yield Wrong(source, found.line, advice)
    for node in source.nodes:
        if isinstance(node, ast.Call) and called(node) in {f"{clock}.sleep" for clock in clocks}:
            yield Wrong(source, node.lineno, advice)


def heavy_imports(source: Source) -> Iterator[Wrong]:
    """Optional dependencies stay in their rooms, and load when they are used."""
    entrance = source.path.name == "__init__.py"
    for found in imports(source):
        if found.top in HEAVY and not source.within(HEAVY_ROOMS):
            yield Wrong(source, found.line, f"imports {found.module}: only {', '.join(HEAVY_ROOMS)} may")
        elif found.top in HEAVY and entrance and not found.on_use:
            yield Wrong(source, found.line, f"loads {found.module} on import: import it where it is used")


def rooms_on_use(source: Source) -> Iterator[Wrong]:
    """A module that uses an optional dependency is imported inside a function, or the dependency isn't optional."""
    for found in imports(source):
        inner = found.module.replace(".", "/")
        heavy = any(Source(f"{path}.py", "").within(HEAVY_ROOMS) for path in (inner, f"{inner}/{found.name}"))
        if heavy and not found.on_use and not source.within(HEAVY_ROOMS) and needs_extra(inner, found.name):
            yield Wrong(source, found.line, f"loads {found.module} on import: import it where it is used")


@cache
def needs_extra(path: str, name: str | None) -> bool:
    """Whether importing this module imports an optional dependency. A module that doesn't exist counts as one."""
    package = () if name is not None else (ROOT / path / "__init__.py",)
    for file in (ROOT / f"{path}/{name}.py", ROOT / f"{path}.py", *package):
        if file.is_file():
            source = Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
            return any(found.top in HEAVY and not found.on_use for found in imports(source))
    return True


def docstring_lines(source: Source) -> Iterator[Wrong]:
    """A docstring gives each parameter a line of its own, which documentation tools can read."""
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number, line in enumerate(node.value.value.splitlines()):
                if re.search(r"\S {3,}\w+(, \w+)*: ", line):
                    text = "several parameters on one line: give each a line under `Args:` or `Attributes:`"
                    yield Wrong(source, node.lineno + number, text)


def public_arguments(source: Source) -> Iterator[Wrong]:
    """A public function with two or more parameters has `Args:`. A method may leave it to its protocol."""
    for node in public(source):
        parts = [node, *node.body] if isinstance(node, ast.ClassDef) else [node]
        for function in parts:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = ast.get_docstring(node if function.name == "__init__" else function)
            declared = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            names = [argument.arg for argument in declared if argument.arg not in ("self", "cls")]
            if text and len(names) > 1 and (function.name == "__init__" or not function.name.startswith("_")):
                for name in set(names) - described(text):
                    advice = f"`{name}` of {function.name} is not described: give it a line under `Args:`"
                    yield Wrong(source, function.lineno, advice)


def public_fields(source: Source) -> Iterator[Wrong]:
    """Each field of a public Struct has a line that says what it is."""
    found = set(structs(source))
    for node in public(source):
        if node in found and isinstance(node, ast.ClassDef):
            lines = described(ast.get_docstring(node) or "")
            fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
            for field in fields:
                if isinstance(field, ast.Name) and field.id not in lines:
                    advice = f"`{field.id}` of {node.name} is not described: give it a line under `Attributes:`"
                    yield Wrong(source, field.lineno, advice)


def public(source: Source) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The classes and functions of this file that docs/public-api.md names."""
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in PUBLIC:
            yield node


def described(docstring: str) -> set[str]:
    """Names that have a line under `Args:` or `Attributes:`."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    lines = re.findall(r"^    (\w+(?:, \w+)*): ", "\n".join(sections), re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def plain_words(source: Source) -> Iterator[Wrong]:
    """Things are no persons, and a sentence is one that a colleague would say."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for found in UNPLAIN.finditer(line):
            yield Wrong(source, number, f"{found[0]!r}: name the process, agent or message, in the field's words")


# --- rules for the tree -----------------------------------------------------------------------------------------------


def import_circles(files: list[Source]) -> Iterator[Wrong]:
    """No module imports itself through others, not even inside a function. Imports for type checkers don't count."""
    by_module = {source.module: source for source in files}
    imported = {source.module: sorted(imported_by(source, set(by_module))) for source in files}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> Iterator[Wrong]:
        if module in path:
            circle = " -> ".join((*path[path.index(module) :], module))
            yield Wrong(by_module[module], 1, f"{circle}: move what both need into a third module")
        elif module not in done:
            for inner in imported[module]:
                yield from walk(inner, (*path, module))
            done.add(module)

    for module in by_module:
        yield from walk(module, ())


def imported_by(source: Source, modules: set[str]) -> set[str]:
    """Which of our modules this one imports when it is imported or used."""
    found = {
        next((name for name in (f"{item.module}.{item.name}", item.module) if name in modules), "")
        for item in imports(source)
        if not item.for_types
    }
    return found - {"", source.module}


def class_names(files: list[Source]) -> Iterator[Wrong]:
    """No class name occurs twice."""
    first: dict[str, Source] = {}
    for source in files:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                other = first.setdefault(node.name, source)
                if other is not source:
                    yield Wrong(source, node.lineno, f"{node.name} is also a class of {other.path}: rename one of them")


def file_names(files: list[Source]) -> Iterator[Wrong]:
    """No file name occurs twice, unless its folder says what it is."""
    first: dict[str, Source] = {}
    for source in files:
        if source.path.stem not in SHARED_FILE_NAMES and not source.within(SHARED_NAME_ROOMS):
            other = first.setdefault(source.path.name, source)
            if other is not source:
                yield Wrong(source, 1, f"is named like {other.path}: rename one of them")


def product_size(files: list[Source]) -> Iterator[Wrong]:
    """The product grows only on purpose."""
    if (lines := sum(source.text.count("\n") for source in files)) > MAX_PRODUCT_LINES:
        yield Wrong(files[0], 1, f"{lines} lines in all, of at most {MAX_PRODUCT_LINES}: what can go for what came?")


def pure_patterns(files: list[Source]) -> Iterator[Wrong]:
    """Every entry of PURE names a file, or a moved module would no longer be checked."""
    for pattern in PURE:
        if not any(source.within((pattern,)) for source in files):
            yield Wrong(Source("tests/test_house.py", ""), 1, f"{pattern} in PURE names no file")


# --- over the tree ----------------------------------------------------------------------------------------------------

SCOPES: tuple[tuple[Callable[[Source], bool], tuple[Rule, ...]], ...] = (
    (lambda source: True, (file_size, function_size, names)),
    (lambda source: source.room != "bench", (no_sleeping,)),
    (
        lambda source: source.room in PRODUCT,
        (
            *(arrows, struct_annotations, struct_fields, safe_loading, heavy_imports, rooms_on_use),
            *(docstring_lines, public_arguments, public_fields, plain_words),
        ),
    ),
    (lambda source: source.within(PURE), (pure_imports, pure_expressions)),
)
OVER_THE_PRODUCT: tuple[TreeRule, ...] = (import_circles, class_names, file_names, product_size, pure_patterns)


@cache
def broken() -> dict[Rule, list[Wrong]]:
    """What breaks each rule for one file. Each file is parsed in its turn: the syntax of all takes a gigabyte."""
    found: dict[Rule, list[Wrong]] = {}
    for source in sources(*PRODUCT, "tests", "bench"):
        for rule in (rule for applies, rules in SCOPES if applies(source) for rule in rules):
            found.setdefault(rule, []).extend(rule(source))
        source.forget()
    return found


def keep(rule: Rule | TreeRule, wrong: Iterable[Wrong]) -> None:
    """Fail with one line for each thing that is wrong."""
    assert not (found := [str(item) for item in wrong]), "\n".join([f"{rule.__doc__}", *found])


@pytest.mark.parametrize("rule", [rule for _, rules in SCOPES for rule in rules], ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rules(rule: Rule) -> None:
    assert rule in broken(), "no files found: is this a checkout?"
    keep(rule, broken()[rule])


@pytest.mark.parametrize("rule", OVER_THE_PRODUCT, ids=lambda rule: rule.__name__)
def test_the_files_together_keep_the_rules(rule: TreeRule) -> None:
    keep(rule, rule(sources(*PRODUCT)))


# --- the rules can fail -----------------------------------------------------------------------------------------------

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
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
    (pure_imports, "workers/machine/decide.py", "from schemas.transport.sockets import Socket", "not pure"),
    (pure_imports, "workers/machine/decide.py", "from schemas import records", "not pure"),
    (pure_imports, "workers/machine/a.py", "from ..agent import Agent", "workers.agent"),
    (pure_imports, "schemas/config.py", "from schemas.profiler.readers import read_yaml", "not pure"),
    (pure_expressions, "workers/machine/decide.py", "x = 0.5", "float"),
    (pure_expressions, "workers/machine/decide.py", "x = hash('a')", "hash()"),
    (pure_expressions, "workers/machine/decide.py", "for x in {1, 2}: pass", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = [y for y in set(z)]", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = tuple({y for y in z})", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = ','.join(frozenset(z))", "sort it"),
    (pure_expressions, "workers/machine/decide.py", "x = (*set(z),)", "sort it"),
    (file_size, "workers/agent.py", "x = 1\n" * (MAX_FILE_LINES + 1), "601 lines"),
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
    (safe_loading, "workers/a.py", "eval('1')", "eval"),
    (safe_loading, "workers/a.py", "torch.load(path, weights_only=True)", "torch.load"),
    (safe_loading, "workers/a.py", "from torch import load", "torch.load"),
    (safe_loading, "workers/a.py", "yaml.load(text)", "yaml.load"),
    (safe_loading, "workers/a.py", "numpy.load(path, allow_pickle=True)", "array file"),
    (no_sleeping, "tests/a.py", "from time import sleep", "sleeps"),
    (no_sleeping, "tests/a.py", "import time as clock\nclock.sleep(1)", "sleeps"),
    (heavy_imports, "workers/agent.py", "def f():\n    import torch.cuda", "torch.cuda"),
    (heavy_imports, "workers/engines/__init__.py", "import sglang", "where it is used"),
    (heavy_imports, "controlplane/cli/demo.py", "import torch", "only"),
    (rooms_on_use, "controlplane/cli/demo.py", "import controlplane.cli.demo_training", "where it is used"),
    (rooms_on_use, "workers/agent.py", "from workers.engines.not_there import Engine", "where it is used"),
    (rooms_on_use, "workers/agent.py", "from workers.engines import not_there", "where it is used"),
    (docstring_lines, "workers/a.py", 'class A:\n    """Text.\n\n    a: One.   b: Two.\n    """', "several parameters"),
    (docstring_lines, "workers/a.py", 'x = 1\n"""Text. a: one.   b, c: Two."""', "several parameters"),
    (
        public_arguments,
        "workers/a.py",
        'def annotate(a, b):\n    """Do.\n\n    Args:\n        a: 1.\n    """',
        "`b` of",
    ),
    (public_arguments, "workers/a.py", 'class Agent:\n    """One."""\n    def __init__(self, a, b): ...', "`a` of"),
    (public_arguments, "workers/a.py", 'class Agent:\n    def ask(self, a, *, b):\n        """Ask."""', "`b` of"),
    (public_fields, "schemas/a.py", 'class Report(Struct):\n    """All."""\n    seq: int', "`seq` of Report"),
    (plain_words, "workers/a.py", '"""Nobody knows."""', "'Nobody'"),
    (plain_words, "workers/a.py", 'raise ValueError("waits for whom?")', "'whom'"),
]
CIRCLE = {"schemas/a.py": "def f():\n    from schemas.b import B", "schemas/b.py": "import schemas.a"}
TREES_CAUGHT: list[tuple[TreeRule, dict[str, str], str]] = [
    (import_circles, CIRCLE, "schemas.a -> schemas.b -> schemas.a"),
    (import_circles, {"workers/a.py": "from . import b", "workers/b.py": "from workers import a"}, "workers.b"),
    (class_names, {"schemas/a.py": "class A: ...", "workers/b.py": "class A: ..."}, "also a class of schemas/a.py"),
    (file_names, {"schemas/a.py": "", "workers/a.py": ""}, "named like schemas/a.py"),
    (product_size, {"schemas/a.py": "\n" * MAX_PRODUCT_LINES, "workers/a.py": "\n"}, "lines in all"),
    (pure_patterns, {"schemas/a.py": ""}, "names no file"),
]


@pytest.mark.parametrize(("rule", "path", "snippet", "says"), CAUGHT)
def test_each_rule_catches_what_it_is_there_for(rule: Rule, path: str, snippet: str, says: str) -> None:
    wrong = list(rule(Source(path, snippet)))
    assert [found for found in wrong if says in found.text], f"{rule.__name__} let this pass: {snippet}"


@pytest.mark.parametrize(("rule", "tree", "says"), TREES_CAUGHT)
def test_each_rule_for_the_tree_catches_what_it_is_there_for(rule: TreeRule, tree: dict[str, str], says: str) -> None:
    wrong = list(rule([Source(path, text) for path, text in tree.items()]))
    assert [found for found in wrong if says in found.text], f"{rule.__name__} let this pass: {tree}"


def test_every_rule_has_been_seen_to_fail() -> None:
    """That it lets good code pass is seen on the tree."""
    caught = {case[0].__name__ for case in CAUGHT} | {case[0].__name__ for case in TREES_CAUGHT}
    written = {
        node.name
        for node in ast.parse(Path(__file__).read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns) == "Iterator[Wrong]"
    }
    assert caught == written


def test_tests_of_one_group_run_on_one_worker(request: pytest.FixtureRequest) -> None:
    """By the name that xdist sorts them by. Else each worker starts clusters and fleets of its own for them."""
    assert request.node.nodeid.endswith("@house") or "PYTEST_XDIST_WORKER" not in os.environ
