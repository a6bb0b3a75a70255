"""The HTTP routes of a server, read from source: from where its app is created, through every router included in it.

A route carries the conditions under which it exists, as they are written: `envs.VLLM_SERVER_DEV_MODE`, `profiler_config
is not None and ...`. FastAPI's rules for what is a query parameter and what is a body are followed. Parameters that a
handler reads from the request by hand (`request.query_params.get("level")`, `body.get("method")`) are found and kept
apart, because they are missing from the server's own openapi.json.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.engines.shapes import REQUIRED, Field, field_default, literal, take_apart, type_text
from tests.engines.sources import Definition, Imports, Module, Tree, called, dotted, flat

VERBS = {"get", "post", "put", "delete", "patch", "head"}
GIVEN = {"Request", "Response", "WebSocket", "HTTPConnection", "BackgroundTasks"}
"""Types of parameters that FastAPI fills by itself."""

Handler = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Body:
    """What a route takes as JSON.

    shape: the class that it is; None for an object of `fields`, one by one.
    listed: stands in openapi.json; else it is read from the request by hand.
    open: which fields there may be can't be seen.
    """

    shape: str | None = None
    fields: tuple[Field, ...] = ()
    required: bool = True
    listed: bool = True
    open: bool = False


@dataclass(frozen=True)
class Route:
    """One handler at one path. `query_by_hand` has the parameters that openapi.json does not list."""

    path: str
    methods: frozenset[str]
    handler: str
    query: tuple[Field, ...] = ()
    query_by_hand: tuple[Field, ...] = ()
    body: Body | None = None
    conditions: tuple[str, ...] = ()


class Mark(NamedTuple):
    """A route decorator: what it says, and the name of the app or router that it puts the route into."""

    path: str
    methods: frozenset[str]
    owner: str


@dataclass(frozen=True)
class Place:
    """The place of a piece of code: its module, the imports of the functions around it, and its conditions."""

    module: Module
    local: Imports
    conditions: tuple[str, ...] = ()

    def under(self, *conditions: str) -> "Place":
        return replace(self, conditions=(*self.conditions, *conditions))


class Reader:
    """Collects routes. `shapes` are the definitions of the classes that bodies are made of, by name."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.routes: list[Route] = []
        self.shapes: dict[str, Definition] = {}
        self._called: set[tuple[str, int, tuple[str, ...]]] = set()

    def read_app(self, module: Module, *functions: str) -> None:
        """Read the app that `module` creates at its top level or in one of `functions`."""
        place = Place(module, {})
        for handler, mark, conditions in declared(module):
            if mark.owner == "app":
                self._add(place.under(*conditions), handler, mark)
        self._statements(place, module.body)
        for name in functions:
            self._function(module.definitions.get(name), place)

    # --- from the app to its routers ---

    def _function(self, found: Definition | None, place: Place) -> None:
        """Read what a function that gets the app does with it."""
        if found is None or not isinstance(found.node, Handler):
            return
        key = (found.module.name, found.node.lineno, place.conditions)
        if key not in self._called:
            self._called.add(key)
            local = dict(pair for statement in flat(found.node.body) for pair in found.module.imported(statement))
            self._statements(Place(found.module, local, place.conditions), found.node.body)

    def _statements(self, place: Place, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                test = ast.unparse(statement.test)
                leaves = isinstance(statement.body[-1], ast.Return | ast.Raise)
                self._statements(place.under(test), statement.body)
                self._statements(place.under(f"not ({test})"), statement.orelse)
                if leaves and not statement.orelse:
                    place = place.under(opposite(statement.test))
            elif isinstance(statement, Handler):
                for mark in marks(statement) if body is not place.module.body else ():
                    self._add(place, statement, mark)
            elif isinstance(statement, ast.Try | ast.With | ast.For):
                self._statements(place, statement.body)
            elif not isinstance(statement, ast.ClassDef):
                for call in ast.walk(statement):
                    if isinstance(call, ast.Call):
                        self._call(place, call)

    def _call(self, place: Place, call: ast.Call) -> None:
        name = called(call)
        first = call.args[0] if call.args else None
        if name == "include_router" and first is not None:
            self._include(place, first)
        elif any(dotted(arg) in {"app", "router"} for arg in call.args) and isinstance(call.func, ast.Name):
            self._function(self.tree.follow(place.module, call.func.id, place.local), place)

    def _include(self, place: Place, router: ast.expr) -> None:
        """Add every route of a router."""
        before, _, name = dotted(router).rpartition(".")
        imports = {**place.module.imports, **place.local}
        if before:
            origin, inner = imports.get(before, (before, None))
            module, name = self.tree.module(f"{origin}.{inner}" if inner else origin), name
        elif name in imports:
            origin, inner = imports[name]
            found = self.tree.follow(place.module, name, place.local)
            module, name = (found.module if found else self.tree.module(origin)), inner or name
        else:
            module = place.module
        if module is not None:
            there = Place(module, {}, place.conditions)
            for handler, mark, conditions in declared(module):
                if mark.owner == name:
                    whole = mark._replace(path=prefix(module, name) + mark.path)
                    self._add(there.under(*conditions), handler, whole)

    # --- one route ---

    def _add(self, place: Place, handler: Handler, mark: Mark) -> None:
        """Collect one route. Of several for one path and method, the first that is served is the one that answers."""
        route = self._parameters(place, handler, mark.path)
        route = replace(route, methods=mark.methods, conditions=place.conditions)
        if route not in self.routes:
            self.routes.append(route)

    def _parameters(self, place: Place, handler: Handler, path: str) -> Route:
        """What the handler takes, sorted by FastAPI's rules."""
        query: list[Field] = []
        body: list[tuple[Field, bool]] = []
        for name, annotation, default in written(handler.args):
            core, _, extras = take_apart(annotation)
            words = {called(extra) or dotted(extra) for extra in (*extras, *([default] if default else []))}
            if words & {"Depends", "Security", "Header", "Cookie"} or named(core) in GIVEN or f"{{{name}" in path:
                continue
            kind = type_text(self.tree, place.module, annotation)
            field = Field(name, kind, field_default(default)[0])
            shape = self._class(place, core)
            if words & {"Body", "Form", "File"} or shape or ("Query" not in words and not scalar(kind)):
                body.append((replace(field, type=shape or kind), embeds([*extras, default])))
            else:
                query.append(field)
        return Route(
            path, frozenset(), handler.name, tuple(query), by_hand_query(handler), self._body(place, handler, body)
        )

    def _class(self, place: Place, core: ast.expr | None) -> str:
        """The class of the tree that a type is, remembered as one that bodies are made of. Empty for other types."""
        found = self.tree.follow(place.module, named(core), place.local) if named(core) else None
        if found is None or not isinstance(found.node, ast.ClassDef):
            return ""
        self.shapes.setdefault(found.node.name, found)
        return found.node.name

    def _body(self, place: Place, handler: Handler, fields: list[tuple[Field, bool]]) -> Body | None:
        if not fields:
            return self._body_by_hand(place, handler)
        required = any(field.required for field, _ in fields)
        alone, embedded = fields[0]
        if len(fields) > 1 or embedded:
            return Body(None, tuple(field for field, _ in fields), required)
        if alone.type in self.shapes:
            return Body(alone.type, (), required)
        return Body(None, (), required, open=True)

    def _body_by_hand(self, place: Place, handler: Handler) -> Body | None:
        """The JSON object that a handler reads from the request itself."""
        reads = [node for node in ast.walk(handler) if called(node) == "json" and not getattr(node, "args", [0])]
        if not reads:
            return None
        local = dict(pair for statement in flat(handler.body) for pair in place.module.imported(statement))
        for call in ast.walk(handler):
            spread = [keyword for keyword in call.keywords if keyword.arg is None] if isinstance(call, ast.Call) else []
            if isinstance(call, ast.Call) and any(reads[0] in ast.walk(keyword) for keyword in spread):
                shape = self._class(replace(place, local=local), call.func)
                if shape:
                    return Body(shape, listed=False)
        fields = tuple(by_hand(handler, "body"))
        return Body(None, fields, listed=False, open=not fields)


# --- what is written --------------------------------------------------------------------------------------------------


def declared(module: Module) -> list[tuple[Handler, Mark, tuple[str, ...]]]:
    """Every handler at the top of a module with its mark and the conditions around it."""
    found: list[tuple[Handler, Mark, tuple[str, ...]]] = []

    def within(body: list[ast.stmt], conditions: tuple[str, ...]) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                test = ast.unparse(statement.test)
                within(statement.body, (*conditions, test))
                within(statement.orelse, (*conditions, f"not ({test})"))
            elif isinstance(statement, Handler):
                found.extend((statement, mark, conditions) for mark in marks(statement))

    within(module.body, ())
    return found


def marks(handler: Handler) -> Iterator[Mark]:
    """The route decorators of a function."""
    for call in handler.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
            verb, owner, path = call.func.attr, dotted(call.func.value), route_path(call.args[0])
            options = {keyword.arg: keyword.value for keyword in call.keywords}
            if verb in VERBS and path is not None:
                yield Mark(path, frozenset({verb.upper()}), owner)
            elif verb == "api_route" and path is not None:
                methods: object = ast.literal_eval(options["methods"]) if "methods" in options else ["GET"]
                assert isinstance(methods, list)
                yield Mark(path, frozenset(methods), owner)


def route_path(node: ast.expr) -> str | None:
    """A path as it is by default: the literal, or what `os.environ.get(name, literal)` falls back to."""
    if isinstance(node, ast.Call) and node.args:
        return route_path(node.args[-1])
    return str(node.value) if isinstance(node, ast.Constant) else None


def prefix(module: Module, router: str) -> str:
    """What `APIRouter(prefix=...)` puts before its paths."""
    found = module.definitions.get(router)
    made = found.node.value if found is not None and isinstance(found.node, ast.Assign) else None
    prefixes = (
        [keyword.value for keyword in made.keywords if keyword.arg == "prefix"] if isinstance(made, ast.Call) else []
    )
    return str(ast.literal_eval(prefixes[0])) if prefixes else ""


def opposite(test: ast.expr) -> str:
    """What holds after `if test: return`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand)
    return f"not ({ast.unparse(test)})"


def written(args: ast.arguments) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """(name, type, default) of each parameter."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip([*plain, *args.kwonlyargs], [*defaults, *args.kw_defaults], strict=True):
        yield arg.arg, arg.annotation, default


def embeds(extras: list[ast.expr | None]) -> bool:
    """Whether `Body(embed=True)` is among the extras of a parameter."""
    return any(keyword.arg == "embed" for extra in extras if isinstance(extra, ast.Call) for keyword in extra.keywords)


def named(node: ast.expr | None) -> str:
    return dotted(node) if node is not None else ""


def scalar(kind: str) -> bool:
    """Whether FastAPI takes a parameter of this type from the query when nothing is said."""
    return kind.partition("[")[0].removesuffix(" | None") in {"", "int", "float", "str", "bool", "Literal"}


def by_hand_query(handler: Handler) -> tuple[Field, ...]:
    """Parameters taken out of `request.query_params`."""
    return tuple(by_hand(handler, "query_params"))


def by_hand(handler: Handler, holder: str) -> Iterator[Field]:
    """Keys that a handler takes out of `holder` by hand. Required: one that it raises over when it is None."""
    refused = {
        dotted(node.test.left)
        for node in ast.walk(handler)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and isinstance(node.body[0], ast.Raise)
    }
    targets = {
        id(node.value): dotted(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        for node in ast.walk(handler)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    }
    for node in ast.walk(handler):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr in {"get", "getlist"} and named(node.func.value).rpartition(".")[2] == holder:
            key = str(ast.literal_eval(node.args[0]))
            default = literal(node.args[1]) if len(node.args) > 1 else None
            many = node.func.attr == "getlist"
            needed = targets.get(id(node)) in refused and len(node.args) == 1
            yield Field(key, "list[str]" if many else "", REQUIRED if needed else [] if many else default)
