"""The project's source, read and never imported: files, their imports, their Structs."""

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
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

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def forget(self) -> None:
        """Give up the syntax, which is parsed again if it is asked for."""
        self.__dict__.pop("tree", None)
        self.__dict__.pop("nodes", None)

    @property
    def room(self) -> str:
        """The top directory."""
        return self.path.parts[0]

    @property
    def module(self) -> str:
        """The name under which it is imported."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    def within(self, patterns: tuple[str, ...]) -> bool:
        return any(self.path.match(pattern) for pattern in patterns)


class Import(NamedTuple):
    """`import module` (name None) or `from module import name`.

    Attributes:
        on_use: Inside a function, or for type checkers only.
        for_types: For type checkers only.
    """

    line: int
    module: str
    name: str | None
    on_use: bool
    for_types: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@cache
def sources(*rooms: str) -> list[Source]:
    return [_source(file) for file in sorted(file for room in rooms for file in (ROOT / room).rglob("*.py"))]


@cache
def _source(file: Path) -> Source:
    return Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))


@cache
def imports(source: Source) -> list[Import]:
    """Every import in the file, relative ones made absolute."""
    return list(_imports(source))


def _imports(source: Source) -> Iterator[Import]:
    functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    checked = [node for node in source.nodes if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"]
    for_types = {id(part) for node in checked for statement in node.body for part in ast.walk(statement)}
    on_use = for_types | {id(part) for node in functions for part in ast.walk(node)}
    for node in source.nodes:
        when = (id(node) in on_use, id(node) in for_types)
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None, *when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = source.path.parts[: -node.level] if node.level else ()
            module = ".".join((*above, *(node.module.split(".") if node.module else ())))
            yield from (Import(node.lineno, module, alias.name, *when) for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; empty for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def called(node: ast.AST) -> str:
    """The dotted name of the function that a call calls."""
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def structs(source: Source) -> Iterator[ast.ClassDef]:
    """Classes that are msgspec Structs: by a base of that name, by a Struct of this file, or by a class option."""
    known = {"Struct", "msgspec.Struct"}
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and (
            known & {dotted(base) for base in node.bases} or STRUCT_OPTIONS & {option.arg for option in node.keywords}
        ):
            known.add(node.name)
            yield node
