"""How many small changes of the machines does a test notice? A random sample, of which each is tried alone.

    python -m tests.mutants --sample 120 --seed 1             # by the suite, and by the simulation alone
    python -m tests.mutants --sample 120 --by simulation      # by the simulation alone
    python -m tests.mutants --sample 120 --by suite           # by the suite: unit tests first, which take less time

Cosmic Ray (extra `mutants`) changes the source: an operator, a comparison, a number, a condition. Drawn are places in
the source, and for each of them one of the changes that are possible there, so that a place at which twelve are does
not count twelve times. Each change is made in a copy of the checkout, one at a time, and tried by the simulation, in
worlds that reach the changed line, as a run without any change shows; then by the other tests that can notice it, until
one fails. That one is named: the last have real sockets and files, and on a busy machine one may fail by itself.

Left out is what says nothing: changes with which a module can't be imported; those that mean the same (`is` for `==`);
those that raise wherever they are reached (`<` for `is`); what falls on annotations, options of classes and the texts
of messages; and limits of 64 or more that are one larger or smaller.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("schemas/desired.py", "controlplane/machine", "workers/machine")
COPIED = (
    "schemas",
    "controlplane",
    "workers",
    "tests",
    "bench",
    "docs",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
)
KINDS: Final = (
    *("AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceUnaryOperator_Delete_Not"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ZeroIterationForLoop"),
    *("ReplaceContinueWithBreak", "ReplaceBreakWithContinue"),
    *(f"ReplaceComparisonOperator_{kind}" for kind in ("Is_IsNot", "IsNot_Is", "Eq_NotEq", "NotEq_Eq")),
    *(f"ReplaceComparisonOperator_{kind}" for kind in ("Eq_Lt", "Eq_LtE", "Eq_Gt", "Eq_GtE", "NotEq_Lt", "NotEq_Gt")),
    *(f"ReplaceComparisonOperator_{kind}" for kind in ("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt")),
    *(f"ReplaceComparisonOperator_{kind}" for kind in ("Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")),
    *(f"ReplaceBinaryOperator_{kind}" for kind in ("Add_Sub", "Sub_Add", "Sub_BitAnd", "Sub_BitOr", "Mul_Add")),
    *(f"ReplaceBinaryOperator_{kind}" for kind in ("FloorDiv_Mul", "LShift_RShift", "BitAnd_BitOr", "BitAnd_Sub")),
    *(f"ReplaceBinaryOperator_{kind}" for kind in ("BitOr_BitAnd", "BitOr_Sub")),
)
"""Kinds of changes that are tried."""
ORDERING: Final = re.compile(r"(Eq|NotEq)_(Lt|LtE|Gt|GtE)$")
NUMBER_MAX: Final = 63
FEEDS_A_MACHINE: Final = re.compile(r"from tests\.unit\.(machines|fleets) import")
HAS_A_MACHINE: Final = re.compile(
    r"from (tests\.unit\.(machines|fleets)|schemas\.desired|(controlplane|workers)(\.machine| import .*\bmachine))\b"
)
SLOW: Final = re.compile(r"tmp_path|async def|ControlPlane|CliRunner")
OTHERS = ("tests/scenarios", "tests/replays", "tests/golden", "tests/properties", "tests/simulation/test_exhaustive.py")
SIMULATION: Final = "simulation"
AT_IMPORT: Final = -1
LIMIT_S = 60
"""Time of a processor for one run of tests. A change that makes them spin is noticed."""

Position = tuple[int, int]
"""Line and column."""


@dataclass(frozen=True)
class Mutant:
    """One change: the `occurrence` of what `operator` changes in a file."""

    file: str
    line: int
    operator: str
    occurrence: int

    def of(self, source: str) -> str:
        """Return the changed source."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        return str(mutate_code(source, get_operator(self.operator)(), self.occurrence) or source)


def places() -> list[list[Mutant]]:
    """Return every place in the machines that can be changed, each with the changes that are possible there."""
    found = []
    for path in sorted(file for name in MACHINES for file in _files(ROOT / name)):
        found += list(_places(str(path.relative_to(ROOT)), path.read_text()).values())
    return found


def _places(file: str, source: str) -> dict[tuple[Position, Position, str], list[Mutant]]:
    import cosmic_ray.plugins as plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    tree, outside = get_ast(source), _Outside(source)
    by_place: dict[tuple[Position, Position, str], list[Mutant]] = {}
    for name in sorted(plugins.operator_names()):
        kind = name.split("/")[-1]
        if kind not in KINDS:
            continue
        operator = plugins.get_operator(name)()
        positions = [position for node in ast_nodes(tree) for position in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            if not outside.has(start, kind):
                place = (start, end, "_".join(kind.split("_")[:2]))  # what is replaced, and not by what
                by_place.setdefault(place, []).append(Mutant(file, start[0], name, occurrence))
    return by_place


class _Outside:
    """The parts of a module of which a change says nothing."""

    def __init__(self, source: str) -> None:
        self.ranges: list[tuple[Position, Position]] = []
        self.texts: list[tuple[Position, Position]] = []  # comparisons with a text: its order means nothing
        self.numbers: set[Position] = set()
        for node in ast.walk(ast.parse(source)):
            self._visit(node)

    def has(self, start: Position, kind: str) -> bool:
        """Whether a kind of change at this position says nothing."""
        if kind == "NumberReplacer" and start in self.numbers:
            return True
        if ORDERING.search(kind) and any(first <= start < end for first, end in self.texts):
            return True
        return any(first <= start < end for first, end in self.ranges)

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.arg(annotation=ast.expr() as part) | ast.AnnAssign(annotation=part):
                self.ranges.append(_range(part))
            case ast.FunctionDef(returns=ast.expr() as part):
                self.ranges.append(_range(part))
            case ast.ClassDef(keywords=keywords):
                self.ranges += [_range(keyword.value) for keyword in keywords]
            case ast.JoinedStr():
                self.ranges.append(_range(node))
            case ast.IfExp(test=test) if _is_text(node.body) and _is_text(node.orelse):
                self.ranges.append(_range(test))
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                self.ranges.append(_range(kinds))
            case ast.Constant(value=int() as number) if abs(number) > NUMBER_MAX:
                self.numbers.add(_range(node)[0])
            case ast.Compare(left=left, comparators=comparators):
                if any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (left, *comparators)):
                    self.texts.append(_range(node))


def _is_text(node: ast.expr) -> bool:
    """Whether an expression only chooses between texts, none of them empty."""
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            return _is_text(body) and _is_text(orelse)
        case ast.Constant(value=str() as text):
            return bool(text)
        case _:
            return isinstance(node, ast.JoinedStr)


def _range(node: ast.expr) -> tuple[Position, Position]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _files(path: Path) -> Iterator[Path]:
    yield from [path] if path.is_file() else path.rglob("*.py")


class Checkout:
    """A copy of the checkout in which one change at a time is made."""

    def __init__(self, folder: Path, seeds: int, reached: dict[tuple[str, int], list[int]]) -> None:
        self.folder, self.seeds, self.reached = folder, seeds, reached
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)

    def noticed(self, mutant: Mutant, text: str, by: str) -> str | None:
        """Return which tests notice that a file has another text: '' if none do, None if it can't be imported."""
        file, path = mutant.file, self.folder / mutant.file
        before = path.read_text()
        try:
            path.write_text(text)
            module = file.removesuffix(".py").replace("/", ".")
            if text == before or self._fails("-c", f"import {module}"):
                return None
            return self.fails(by, self._reaching(mutant, before), file)
        finally:
            path.write_text(before)

    def fails(self, by: str, worlds: list[int], file: str = "") -> str:
        """Return which test fails, or that the simulation does: '' if none does."""
        for arguments in self._attempts(by, worlds, file):
            if failed := self._fails(*arguments):
                return SIMULATION if arguments[0] == "-c" else failed
        return ""

    def _reaching(self, mutant: Mutant, source: str) -> list[int]:
        """The worlds that reach its line, or its statement if the line has no code of its own."""
        statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
        spans = (range(node.lineno, (node.end_lineno or 0) + 1) for node in statements)
        span = min((span for span in spans if mutant.line in span), key=len, default=range(0))
        for lines in ([mutant.line], span):
            if found := {world for line in lines for world in self.reached.get((mutant.file, line), ())}:
                return list(range(self.seeds)) if AT_IMPORT in found else sorted(found)[: self.seeds]
        return []

    def _attempts(self, by: str, worlds: list[int], changed: str) -> Iterator[Sequence[str]]:
        """What can notice a change of a file, as arguments of Python: unit tests of its module, then of its side, …"""
        simulated = "-c", f"from tests.simulation.cluster import simulate\nfor seed in {worlds}: simulate(seed)"
        if by != "suite":
            yield simulated
        if by == SIMULATION:
            return
        module = Path(changed).stem
        of_it = re.compile(rf"from (schemas|\w+\.machine)(\.{module} import| import .*\b{module}\b)")
        of_side = "tests.unit.fleets" if changed.startswith("controlplane") else "tests.unit.machines"
        units = {str(file): file.read_text() for file in sorted((self.folder / "tests/unit").glob("test_*.py"))}
        fast = [name for name, text in units.items() if FEEDS_A_MACHINE.search(text) and not SLOW.search(text)]
        near = [name for name in fast if name.endswith(f"/test_{module}.py") or of_it.search(units[name])]
        side = [name for name in fast if name not in near and of_side in units[name]]
        slow = [name for name, text in units.items() if name not in fast and HAS_A_MACHINE.search(text)]
        pytest = "-m", "pytest", "-xq", "-n0", "-p", "no:cacheprovider"
        for names in filter(None, (near, side, [name for name in fast if name not in (*near, *side)])):
            yield *pytest, *names
        if by == "suite":
            yield simulated
        yield *pytest, *OTHERS
        yield *pytest, *slow

    def _fails(self, *arguments: str) -> str:
        """What failed: a test, or only that something did; '' if nothing."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        limit = f'ulimit -t {LIMIT_S}; exec "$@"'
        command = ["sh", "-c", limit, "sh", sys.executable, *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=10 * LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return "out of time"
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return "" if done.returncode == 0 else named[1] if named else f"code {done.returncode}"


def reached_by(worlds: int) -> dict[tuple[str, int], list[int]]:
    """Return which of so many worlds reach each line of the machines; `AT_IMPORT` for what runs at an import."""
    from coverage import Coverage

    files = [str(file) for name in MACHINES for file in _files(ROOT / name)]
    every = Coverage(data_file=None, config_file=False, include=files)
    every.start()
    from tests.simulation.cluster import simulate

    for seed in range(worlds):
        every.switch_context(str(seed))
        simulate(seed)
    every.stop()
    reached: dict[tuple[str, int], list[int]] = {}
    for path in (data := every.get_data()).measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            seeds = [int(context) if context else AT_IMPORT for context in contexts]
            reached[str(Path(path).relative_to(ROOT)), line] = seeds
    return reached


def changed_line(before: str, after: str) -> str:
    """Return the first line that differs, as it is afterwards."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((new.strip() for old, new in pairs if old != new), "")


def main() -> int:
    """Try a sample, and print what was noticed by which tests, and both shares."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--sample", type=int, default=120, help="places to change")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--seeds", type=int, default=200, help="worlds for each change, at most")
    parser.add_argument("--worlds", type=int, default=400, help="worlds of which those are taken that reach its line")
    parser.add_argument("--by", choices=("both", "suite", SIMULATION), default="both")
    parser.add_argument("--minutes", type=float, default=40, help="begin no other change after this time")
    options = parser.parse_args()
    os.nice(10)
    every = places()
    rng = random.Random(options.seed)
    ends = time.monotonic() + 60 * options.minutes
    tried: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        checkout = Checkout(Path(folder), options.seeds, reached_by(options.worlds))
        if broken := checkout.fails(options.by, []):
            sys.stderr.write(f"without any change, tests fail: {broken}\n")
            return 2
        for mutant in map(rng.choice, rng.sample(every, min(options.sample, len(every)))):
            if time.monotonic() > ends:
                break
            before = (checkout.folder / mutant.file).read_text()
            text = mutant.of(before)
            by = checkout.noticed(mutant, text, options.by)
            if by is not None:
                tried.append(by)
            kind = mutant.operator.split("/")[-1].removeprefix("Replace")
            line = f"{mutant.file}:{mutant.line} {kind}: {changed_line(before, text)}"
            sys.stdout.write(f"{'not imported' if by is None else by or 'NOT NOTICED'} | {line}\n")
            sys.stdout.flush()
    noticed = {"suite": len([by for by in tried if by]), SIMULATION: tried.count(SIMULATION)}
    for judge in noticed if options.by == "both" else [options.by]:
        share = 100 * noticed[judge] // max(1, len(tried))
        sys.stdout.write(f"by the {judge}: {noticed[judge]} of {len(tried)}, {share} % ({len(every)} places in all)\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
