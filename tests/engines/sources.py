"""Python source as names that can be followed: what class, function or alias a name means, with nothing imported.

A `Tree` is a folder of packages; a `Module` is one of its files. `tree.follow(module, "PauseMode")` goes through
imports and re-exports to the statement that defines the name. Only what names need is understood.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple


class Definition(NamedTuple):
    """A statement at the top of `module` that gives a name its meaning: a class, a function or an assignment."""

    module: "Module"
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


Imports = dict[str, tuple[str, str | None]]
"""Local name -> (absolute module, name in it); the name is None where the module itself was imported."""


class Module:
    """One file, parsed when it is first looked into."""

    def __init__(self, tree: "Tree", file: Path) -> None:
        self.tree, self.file = tree, file
        parts = file.relative_to(tree.root).with_suffix("").parts
        self._package = parts[:-1]
        self.name = ".".join(self._package if parts[-1] == "__init__" else parts)

    @cached_property
    def body(self) -> list[ast.stmt]:
        return ast.parse(self.file.read_text("utf-8"), str(self.file)).body

    @cached_property
    def imports(self) -> Imports:
        return dict(pair for statement in flat(self.body) for pair in self.imported(statement))

    @cached_property
    def stars(self) -> list[str]:
        """Modules of which everything is imported."""
        return [origin for name, (origin, _) in self.imports.items() if name.startswith("*")]

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Of several with one name (branches of an `if`), the first."""
        found: dict[str, Definition] = {}
        for statement in flat(self.body):
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(statement.name, Definition(self, statement))
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, Definition(self, statement))
        return found

    def imported(self, statement: ast.stmt) -> Iterator[tuple[str, tuple[str, str | None]]]:
        """The local names that an import statement binds."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.asname or alias.name, (alias.name, None)
        elif isinstance(statement, ast.ImportFrom):
            above = self._package[: len(self._package) - statement.level + 1] if statement.level else ()
            module = ".".join((*above, *(statement.module.split(".") if statement.module else ())))
            for alias in statement.names:
                yield (f"* of {module}" if alias.name == "*" else alias.asname or alias.name), (module, alias.name)


class Tree:
    """Packages under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = cache(self._module)

    def _module(self, name: str) -> Module | None:
        base = self.root.joinpath(*name.split("."))
        for file in (base.with_suffix(".py") if "." in name else base, base / "__init__.py"):
            if file.is_file() and file.suffix == ".py":
                return Module(self, file)
        return None

    def holding(self, pattern: str) -> list[Module]:
        """Every module with a line that `pattern` matches, in the order of their paths."""
        wanted = re.compile(pattern, re.MULTILINE)
        files = [file for file in sorted(self.root.rglob("*.py")) if wanted.search(file.read_text("utf-8"))]
        names = [".".join(file.relative_to(self.root).with_suffix("").parts) for file in files]
        return [found for name in names if (found := self.module(name.removesuffix(".__init__"))) is not None]

    def follow(self, module: Module, name: str, local: Imports | None = None) -> Definition | None:
        """What `name` means in `module` (imports of the function around it: `local`). None: defined elsewhere."""
        imports = module.imports if local is None else {**module.imports, **local}
        if name in imports:
            origin, inner = imports[name]
            found = self.module(origin)
            return None if found is None or inner is None else self.follow(found, inner)
        if name in module.definitions:
            return module.definitions[name]
        starred = [star for star in map(self.module, module.stars) if star is not None]
        return next((meaning for star in starred if (meaning := self.follow(star, name)) is not None), None)


def flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a block and of the `if`, `try` and `with` in it, in order: what runs when a module is loaded."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from flat([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handled = [inner for handler in statement.handlers for inner in handler.body]
            yield from flat([*statement.body, *handled, *statement.orelse, *statement.finalbody])
        elif isinstance(statement, ast.With):
            yield from flat(statement.body)


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; empty for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def called(node: ast.AST) -> str:
    """The last name of what a call calls: `field` for `dataclasses.field(...)`. Empty for what is no call of a name."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
