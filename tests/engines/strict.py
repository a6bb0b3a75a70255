"""Stand-ins for one release of an engine that refuse every call that this release does not have.

`App(surface)` is the server: 404 for a route that the release lacks, 405 for a wrong method, 400 for a body field or
query parameter that is unknown, missing or of the wrong type. A real server silently ignores unknown ones and does
something other than what was asked; here they are detected. Everything else is answered 200, as the test says.

`stand_in(surface)` is the object that is called in process, with the release's own signatures.
`request_module(surface)` holds its request classes.
"""

import inspect
import json
import typing
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import httpcore
import msgspec

from tests.engines.surfaces import ENGINE, Route, Surface, openapi, signature


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


class App(httpcore.AsyncConnectionInterface):
    """A server, as the connections of a client that calls it.

    asked: every request in order, refused ones too.   answers: by path; may be changed.
    """

    def __init__(self, surface: Surface, answers: Mapping[str, Answer] | None = None) -> None:
        self.requests: list[ReceivedRequest] = []
        self.answers: dict[str, Answer] = {"/openapi.json": openapi(surface), **(answers or {})}
        self._surface = surface
        listing = Route("/openapi.json", "GET")
        self._routes = {**surface.routes, "/openapi.json": {"GET": listing}}

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        assert isinstance(request.stream, AsyncIterable)
        content = b"".join([part async for part in request.stream])
        target = urlsplit(request.url.target.decode())
        method, path, query = request.method.decode(), target.path, tuple(parse_qsl(target.query, True))
        reply, body = self._refusal(method, path, query, content)
        if reply is None:
            answer = await given(self.answers.get(path, {}), (body,), {})
            reply = answer if isinstance(answer, Reply) else Reply(200, answer)
        self.requests.append(ReceivedRequest(method, path, query, body, reply.status))
        text = reply.body if isinstance(reply.body, bytes | str) else json.dumps(reply.body)
        return httpcore.Response(reply.status, content=text.encode() if isinstance(text, str) else text)

    async def aclose(self) -> None:
        """Nothing to close."""

    def _refusal(
        self, method: str, path: str, query: tuple[tuple[str, str], ...], raw: bytes
    ) -> tuple[Reply | None, Any]:
        """Return why this release would not serve the request, or None; and the body as JSON."""
        try:
            body = json.loads(raw) if raw else None
        except ValueError as error:
            return Reply(400, {"detail": f"the body is no JSON: {error}"}), raw
        methods = self._routes.get(path)
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
        elif not raw or (body is None and not route.required):
            if route.required:
                yield "needs a JSON body, got none: {} is not the same as nothing"
        elif wanted != "...":
            if not isinstance(body, dict):
                yield f"takes a JSON object, got {body!r}"
            else:
                yield from faults("body field", self._surface.body_fields(route), body, strict=True)


def query_faults(route: Route, query: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """Return what is wrong with a query string, one sentence for each problem."""
    fields = [field for text in (route.query, route.by_hand) for field in signature(text).parameters.values()]
    many = {field.name for field in fields if str(field.annotation).startswith("list")}
    names = [name for name, _ in query]
    for name in sorted({name for name in names if names.count(name) > 1} - many):
        yield f"takes query parameter {name} once, got {names.count(name)}"
    values = {name: [text for key, text in query if key == name] if name in many else value for name, value in query}
    yield from faults("query parameter", fields, values, strict=False)


def faults(what: str, fields: Iterable[inspect.Parameter], values: Mapping[str, Any], strict: bool) -> Iterator[str]:
    """Return unknown, missing and mistyped names. If `strict`, a number as text is mistyped; in a query it is not."""
    known = {field.name: field for field in fields}
    for name in values:
        if name not in known:
            yield f"has no {what} {name} (it has {', '.join(sorted(known)) or 'none'})"
    for field in fields:
        if field.default is field.empty and field.name not in values:
            yield f"needs {what} {field.name}"
        elif field.name in values:
            written = "" if field.annotation is field.empty else field.annotation
            try:
                msgspec.convert(values[field.name], type_of(written), strict=strict)
            except msgspec.ValidationError as error:
                place = f"{what} {field.name}" if strict else f"query.{field.name}"  # as FastAPI locates it
                yield f"{place}: {error} ({written})"


def type_of(text: str) -> Any:
    """Return a type as written in source as one to check values against; Any if it is not a plain one."""
    try:
        built = eval(text, {}, vars(typing)) if text else Any  # our own file
        msgspec.json.Decoder(built)
    except (NameError, TypeError):  # a class of the engine's; some unions can't be told apart from JSON
        return Any
    return built


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
    assert not unknown, f"{ENGINE[surface.kind]} of {surface.kind} {surface.version} has no {', '.join(unknown)}"
    methods = {
        name: method_like(name, takes, name in surface.asynchronous, calls, replies)
        for name, takes in surface.methods.items()
    }
    return StandIn(type(ENGINE[surface.kind], (), {**methods, **attributes})(), calls, replies)


def method_like(
    name: str, takes: inspect.Signature, asynchronous: bool, calls: list[Called], answers: Mapping[str, Answer]
) -> Callable[..., Any]:
    """A function with exactly this signature that records its calls. One that does not fit raises TypeError."""

    def record(args: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
        arguments = dict(takes.bind(*args, **named).arguments)
        calls.append(Called(name, arguments))
        return arguments

    async def later(self: object, *args: object, **named: object) -> Any:
        return await given(answers.get(name), (), record(args, named))

    def at_once(self: object, *args: object, **named: object) -> Any:
        arguments = record(args, named)
        answer = answers.get(name)
        if isinstance(answer, BaseException):
            raise answer
        return answer(**arguments) if callable(answer) else answer

    function: Any = later if asynchronous else at_once
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    function.__signature__ = takes.replace(parameters=[own, *takes.parameters.values()])
    made: Callable[..., Any] = function
    return made


# --- request classes --------------------------------------------------------------------------------------------------


def request_module(surface: Surface) -> ModuleType:
    """A module like the one of the release's request classes, by name."""
    module = ModuleType(surface.requests)
    for name, takes in surface.classes.items():
        setattr(module, name, request_class(name, takes))
    return module


def request_class(name: str, takes: inspect.Signature) -> type:
    """Return a class with this constructor. It does not check values, as the engines' classes don't."""

    def construct(self: Any, *args: object, **named: object) -> None:
        bound = takes.bind(*args, **named)
        bound.apply_defaults()
        vars(self).update(bound.arguments)

    return type(name, (), {"__init__": construct, "__struct_fields__": tuple(takes.parameters)})
