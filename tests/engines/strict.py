"""Stand-ins for one release of an engine that refuse every call that this release does not have.

`App(surface)` is the server: 404 for a route that the release lacks, 405 for a wrong method, 400 for a body field or
query parameter that is unknown, missing or of the wrong type. A real server silently ignores unknown ones and does
something other than what was asked; here they are detected. Everything else is answered 200, as the test says.

`stand_in(surface)` is the object that is called in process, with the release's own signatures.
`request_module(surface)` holds its request classes.
"""

import ast
import dataclasses
import enum
import inspect
import json
import re
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from functools import reduce
from operator import or_
from types import ModuleType
from typing import Any, Literal, NamedTuple

import httpcore
import httpx
import msgspec

from tests.engines.routes import Route
from tests.engines.shapes import Expression, Field, Made, Method, Shape
from tests.engines.surfaces import Surface, openapi


class ReceivedRequest(NamedTuple):
    """One request as the server received it, its body as JSON (None if empty), and the status of the answer."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    body: Any
    status: int


class Reply(NamedTuple):
    """An answer with a status of its own. In the body, bytes and str are sent as they are, all else as JSON."""

    status: int
    body: Any = None


Answer = Reply | Callable[..., Any] | Any
"""The answer of a route or method: a value, a `Reply`, an exception to raise, or a function that gives one.

A function gets what was asked: the JSON body, or a method's arguments by name. It may be async.
"""


class App(httpx.AsyncBaseTransport):
    """A server, as the transport of a client that calls it.

    asked: every request in order, refused ones too.   answers: by path; may be changed.
    """

    def __init__(self, surface: Surface, answers: Mapping[str, Answer] | None = None) -> None:
        self.requests: list[ReceivedRequest] = []
        self.answers: dict[str, Answer] = {"/openapi.json": openapi(surface), **(answers or {})}
        self._surface = surface
        listing = Route("/openapi.json", frozenset({"GET"}), "openapi")
        served = {**surface.served(), "/openapi.json": {"GET": listing}}
        self._routes = [(path_pattern(path), methods) for path, methods in served.items()]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        method, path, query = request.method, request.url.path, tuple(request.url.params.multi_items())
        reply, body = self._refusal(method, path, query, await request.aread())
        if reply is None:
            answer = await given(self.answers.get(path, {}), (body,), {})
            reply = answer if isinstance(answer, Reply) else Reply(200, answer)
        self.requests.append(ReceivedRequest(method, path, query, body, reply.status))
        if isinstance(reply.body, bytes | str):
            return httpx.Response(reply.status, content=reply.body)
        return httpx.Response(reply.status, json=reply.body)

    def _refusal(
        self, method: str, path: str, query: tuple[tuple[str, str], ...], raw: bytes
    ) -> tuple[Reply | None, Any]:
        """Return why this release would not serve the request, or None; and the body as JSON."""
        try:
            body = json.loads(raw) if raw else None
        except ValueError as error:
            return Reply(400, {"detail": f"the body is no JSON: {error}"}), raw
        methods = next((methods for pattern, methods in self._routes if pattern.fullmatch(path)), None)
        if methods is None:
            return Reply(404, {"detail": "Not Found"}), body
        if method not in methods:
            return Reply(405, {"detail": f"Method Not Allowed; this release has {sorted(methods)}"}), body
        route = methods[method]
        wrong = [*query_faults(route, query), *self._body_faults(route, raw, body)]
        name = f"{self._surface.kind} {self._surface.version} {method} {path}"
        return (Reply(400, {"detail": f"{name}: {'; '.join(wrong)}"}) if wrong else None), body

    def _body_faults(self, route: Route, raw: bytes, body: Any) -> Iterator[str]:
        wanted = route.body
        if wanted is None:
            if body:  # {} asks for nothing that could be ignored
                yield f"takes no body, got {body!r}"
        elif not raw or (body is None and not wanted.required):
            if wanted.required:
                yield "needs a JSON body, got none: {} is not the same as nothing"
        elif not wanted.open:
            if not isinstance(body, dict):
                yield f"takes a JSON object, got {body!r}"
            else:
                yield from faults("body field", self._surface.body_fields(route), body, strict=True)


class AppPool(httpcore.AsyncConnectionInterface):
    """The connections to such a server, for our client."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        assert isinstance(request.stream, AsyncIterable)
        content = b"".join([part async for part in request.stream])
        asked = httpx.Request(request.method.decode(), bytes(request.url).decode(), content=content)
        answer = await self._app.handle_async_request(asked)
        return httpcore.Response(answer.status_code, content=await answer.aread())

    async def aclose(self) -> None:
        """Nothing to close."""


def path_pattern(path: str) -> re.Pattern[str]:
    """`/v1/models/{model:path}` as a pattern of the paths that it stands for."""
    parts = re.split(r"{(\w+)(?::(path))?}", path)
    text = [re.escape(plain) for plain in parts[::3]]
    holes = [".*" if kind == "path" else "[^/]+" for kind in parts[2::3]]
    return re.compile("".join(piece for pair in zip(text, [*holes, ""], strict=True) for piece in pair))


def query_faults(route: Route, query: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """Return what is wrong with a query string, one sentence for each problem."""
    fields = (*route.query, *route.query_by_hand)
    many = {field.name for field in fields if field.type.startswith("list")}
    names = [name for name, _ in query]
    for name in sorted({name for name in names if names.count(name) > 1} - many):
        yield f"takes query parameter {name} once, got {names.count(name)}"
    values = {name: [text for key, text in query if key == name] if name in many else value for name, value in query}
    yield from faults("query parameter", fields, values, strict=False)


def faults(what: str, fields: tuple[Field, ...], values: Mapping[str, Any], strict: bool) -> Iterator[str]:
    """Return unknown, missing and mistyped names. If `strict`, a number as text is mistyped; in a query it is not."""
    known = {field.name: field for field in fields}
    for name in values:
        if name not in known:
            yield f"has no {what} {name} (it has {', '.join(sorted(known)) or 'none'})"
    for field in fields:
        if field.required and field.name not in values:
            yield f"needs {what} {field.name}"
        elif field.name in values:
            try:
                msgspec.convert(values[field.name], type_of(field.type), strict=strict)
            except msgspec.ValidationError as error:
                yield f"{what} {field.name}: {error} ({field.type})"


def type_of(text: str) -> Any:
    """Return a type as written in source as one to check values against; Any if it is not a plain one."""
    built = built_type(ast.parse(text, mode="eval").body) if text else Any
    try:
        msgspec.json.Decoder(built)
    except TypeError:  # some unions can't be told apart from JSON
        return Any
    return built


def built_type(node: ast.expr) -> Any:
    plain = {"int": int, "float": float, "str": str, "bool": bool, "dict": dict, "Dict": dict, "list": list}
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name):
            return plain.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return built_type(left) | built_type(right)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            listed = ast.literal_eval(values)
            return Literal[listed if isinstance(listed, tuple) else (listed,)]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return built_type(inner) | None
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=sides)):
            return reduce(or_, [built_type(side) for side in sides])
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inner):
            return list[built_type(inner)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="dict" | "Dict"), slice=ast.Tuple(elts=[key, value])):
            return dict[built_type(key), built_type(value)]  # type: ignore[misc]
    return Any


async def given(answer: Answer, args: tuple[object, ...], named: Mapping[str, object]) -> Any:
    """Resolve an answer: raise it, call it, await it, or return it as it is."""
    if isinstance(answer, BaseException):
        raise answer
    if callable(answer):
        answer = answer(*args, **named)
    return await answer if inspect.isawaitable(answer) else answer


# --- in process -------------------------------------------------------------------------------------------------------


class Called(NamedTuple):
    """One call of a method, with the arguments that were given, by name."""

    method: str
    arguments: dict[str, object]


class StandIn(NamedTuple):
    """A stand-in and its record.

    Attributes:
        engine: Has the release's methods and nothing else.
        calls: The calls, in order.
        answers: By method; None for any other.
    """

    engine: Any
    calls: list[Called]
    answers: dict[str, Answer]


def stand_in(surface: Surface, answers: Mapping[str, Answer] | None = None, **attributes: object) -> StandIn:
    """SGLang's TokenizerManager or vLLM's AsyncLLM with the methods of one release.

    attributes: are set on it if it has them.
    """
    calls: list[Called] = []
    replies: dict[str, Answer] = dict(answers or {})
    unknown = sorted({*replies} - {*surface.methods}) + sorted({*attributes} - surface.attributes)
    assert not unknown, f"{surface.engine} of {surface.kind} {surface.version} has no {', '.join(unknown)}"
    methods = {
        name: method_like(method, calls, replies)
        for name, method in surface.methods.items()
        if not (name.startswith("__") and name.endswith("__"))
    }
    return StandIn(type(surface.engine, (), {**methods, **attributes})(), calls, replies)


def method_like(method: Method, calls: list[Called], answers: Mapping[str, Answer]) -> Callable[..., Any]:
    """A function with exactly this signature that records its calls. One that does not fit raises TypeError."""

    def record(args: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
        arguments = dict(method.signature.bind(*args, **named).arguments)
        calls.append(Called(method.name, arguments))
        return arguments

    async def later(self: object, *args: object, **named: object) -> Any:
        return await given(answers.get(method.name), (), record(args, named))

    def at_once(self: object, *args: object, **named: object) -> Any:
        arguments = record(args, named)
        answer = answers.get(method.name)
        if isinstance(answer, BaseException):
            raise answer
        return answer(**arguments) if callable(answer) else answer

    function: Any = later if method.asynchronous else at_once
    function.__name__ = method.name
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    function.__signature__ = inspect.Signature([own, *method.parameters])
    made: Callable[..., Any] = function
    return made


# --- request classes --------------------------------------------------------------------------------------------------


def request_module(surface: Surface) -> ModuleType:
    """A module like the one of the release's request classes: its dataclasses, Structs and enums, by name."""
    module = ModuleType(surface.requests)
    shapes = sorted(surface.shapes.values(), key=lambda shape: shape.form != "enum")  # enums first: they are defaults
    for shape in shapes:
        if shape.form == "enum":
            setattr(module, shape.name, enum.Enum(shape.name, [(field.name, field.default) for field in shape.fields]))
        elif shape.form in {"dataclass", "struct"}:
            setattr(module, shape.name, request_class(shape, module))
    return module


def request_class(shape: Shape, module: ModuleType) -> type:
    """Return a class with the constructor of `shape`. It does not check values, as the engines' classes don't."""
    if shape.form == "struct":
        keyword_only = any(field.keyword_only for field in shape.fields)
        fields = [
            (field.name, Any)
            if field.required
            else (field.name, Any, msgspec.field(default_factory=maker(field, module)))
            for field in shape.fields
        ]
        return msgspec.defstruct(shape.name, fields, kw_only=keyword_only)
    return dataclasses.make_dataclass(shape.name, [dataclass_field(field, module) for field in shape.fields])


def dataclass_field(field: Field, module: ModuleType) -> tuple[str, Any, Any]:
    if field.required:
        return field.name, Any, dataclasses.field(kw_only=field.keyword_only)
    return field.name, Any, dataclasses.field(default_factory=maker(field, module), kw_only=field.keyword_only)


def maker(field: Field, module: ModuleType) -> Callable[[], Any]:
    """Return what creates the default of a field."""
    default = field.default
    if isinstance(default, Made):
        empty: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "set": set}
        inner = default.text.removeprefix("lambda: ")
        return empty.get(inner, lambda: Expression(inner))
    if isinstance(default, Expression):
        holder, _, member = default.text.partition(".")
        found = getattr(getattr(module, holder, None), member, default) if member else default
        return lambda: found
    return lambda: default.copy() if isinstance(default, list | dict | set) else default
