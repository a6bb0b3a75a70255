"""The HTTP client for engine servers (SGLang's, vLLM's) and for the router in front of them.

Rule 1  A request that reads has a timeout and is retried. A request that changes an engine is sent once, unless its
        route is marked as repeatable. It has no timeout of its own, because giving up would not undo it: the agent's
        machine reports it as late, and TCP keep-alive notices a dead connection.
Rule 2  Any status other than 2xx is an error that carries the status and the server's message.
Rule 3  An answer is bounded in bytes, and its body in time once its headers have come. It is never decompressed, and is
        not trusted to have any shape.
Rule 4  A connection is kept only after an answer that was read to its end, and used again only if nothing has arrived
        on it meanwhile, and not after KEEP_S: a server that closes it at the same moment could lose the request.
Rule 5  The key comes from the environment or a file, and appears in no message and no log.
"""

import json
import random
import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import anyio
import httpcore

from schemas.errors import ConfigError, EngineError, RefusedError, UnansweredError
from workers.engines.api_key import KEY_VARIABLE
from workers.engines.client import READ_TIMEOUT_S, CallNotBegun, CallRefused, Methods, list_at, mapping_at, text_at

CONNECT_TIMEOUT_S: Final = 5.0
LAUNCH_TIMEOUT_S: Final = 30.0
"""For what is read once for each launch: the first answer of a fresh vLLM takes 6 s on an idle machine."""
ATTEMPTS: Final = 3
BACKOFF_S: Final = 0.2
"""Wait before the second attempt; doubles, with jitter."""
QUOTED_MAX: Final = 500
"""Characters of a server's answer that are quoted in an error."""
BODY_S: Final = 30.0
"""How long the body of an answer may take. Only what a call does in the engine may take longer."""
ANSWER_BYTES: Final = 8 << 20
"""Largest answer that is read."""
UNREADABLE: Final = "?"
"""A value of no parameter that is a truth value, a number, or one of some words."""
KEEP_S: Final = 3.0
"""Time for which an idle connection is kept. uvicorn closes it after 5 s."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 0x10), 30),  # 0x10: macOS, netinet/tcp.h
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_NOT_SENT: Final = (httpcore.ConnectError, httpcore.ConnectTimeout)
_FINAL: Final = (*_NOT_SENT, TimeoutError)
"""Not listening, or hanging: another attempt would only take longer."""
_NOT_BEGUN: Final = (401, 403, 404, 405, 409, 413, 422, 429)
"""Statuses with which a server turns a request away before it does anything."""
_NOT_QUOTED: Final = "/?&=%:,@+~!$'()*;"
"""Characters of a target that are sent as they are, beside letters and digits."""


class Route(NamedTuple):
    """The route of one engine method.

    Attributes:
        query: The arguments go into the URL; otherwise into a JSON body.
        answer: Key of the result within the JSON answer; None for the whole answer.
        renamed: The server's names of arguments, where they differ.
        repeatable: Idempotent, so it may be retried.
        undeclared: Parameters that the server reads but does not list in its openapi.json.
        unlisted: The server may have it without listing it in its openapi.json.
    """

    verb: Literal["GET", "POST", "DELETE"]
    path: str
    query: bool = False
    answer: str | None = None
    renamed: Mapping[str, str] = {}
    repeatable: bool = False
    undeclared: frozenset[str] = frozenset()
    timeout_s: float | None = None
    unlisted: bool = False


class HttpReader:
    """An `EngineReader` of one server. It sends GET requests, and those only to the paths that it is given.

    Raises ConfigError.

    Args:
        url: http://HOST:PORT.
        routes: The engine's methods by name. A reader leaves out those that are no GET.
        info_path: Path of the launch settings; 404 there means that this node has no front end.
        key: Sent as a bearer token.
    """

    def __init__(self, url: str, routes: Mapping[str, Route], *, info_path: str, key: str | None = None) -> None:
        self.where = base_url(url)
        self._routes = {name: route for name, route in routes.items() if self._offers(route)}
        self._info_path = info_path
        self._url = httpcore.URL(self.where)
        tls = self._url.scheme == b"https"
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl.create_default_context() if tls else None,  # the system's certificates, or SSL_CERT_FILE
            max_connections=None,
            keepalive_expiry=KEEP_S,
            network_backend=httpcore.AnyIOBackend(),
            socket_options=_KEEPALIVE,
        )
        # TCP and TLS connect one after the other, each with a timeout of its own.
        self._limits = {"timeout": {"connect": CONNECT_TIMEOUT_S / 2 if tls else CONNECT_TIMEOUT_S}}
        self._headers = [
            *((b"Host", urlsplit(self.where).netloc.encode()), (b"Accept", b"*/*"), (b"Accept-Encoding", b"identity")),
            (b"User-Agent", b"rolloutctl"),
            *([(b"Authorization", f"Bearer {key}".encode())] if key else []),
        ]

    def _offers(self, route: Route) -> bool:
        return route.verb == "GET"

    async def open(self) -> None:
        """Do nothing: a server can be called from anywhere."""

    async def methods(self) -> Methods | None:
        """Read the server's openapi.json. Raises CallRefused if it has none, EngineError if it does not answer.

        The document lists what there may be. A server that answers anything at all is no engine for that.
        """
        try:
            document = await self.get("/openapi.json")
        except RefusedError as error:
            if isinstance(error.__cause__, httpcore.ConnectError):
                return None
            raise
        if "paths" not in document:
            raise self._no_engine("/openapi.json", "what is no OpenAPI document")
        paths, found = mapping_at(document, "paths"), {}
        for name, route in self._routes.items():
            verbs = mapping_at(paths, route.path)
            if route.unlisted or route.verb.lower() in verbs:
                found[name] = _parameters(mapping_at(verbs, route.verb.lower()), document) | route.undeclared
        return found

    async def info(self) -> Mapping[str, object] | None:
        """Return the launch settings; None if the server has no such route. Raises EngineError."""
        try:
            return self._of_engine(await self.get(self._info_path))
        except CallRefused as error:
            if error.status == 404:
                return None
            raise

    def _of_engine(self, info: dict[str, Any]) -> Mapping[str, object]:
        """Return launch settings. Raises CallRefused if they name no version, as those of an engine do."""
        if text_at(info, "version") is None:
            raise self._no_engine(self._info_path, "without an engine's version")
        return info

    def _no_engine(self, path: str, found: str) -> CallRefused:
        return CallRefused(f"{self.where}{path} answered 200 {found}: it is no engine", 200, found)

    async def read(self, method: str, /) -> object:
        route = self._routes[method]
        return _result(route, await self._send(route, {}, ATTEMPTS, READ_TIMEOUT_S))

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path, an empty one for anything else. Raises as `EngineClient.call`."""
        answer = _json(await self._send(Route("GET", path), {}, ATTEMPTS, LAUNCH_TIMEOUT_S))
        return answer if isinstance(answer, dict) else {}

    async def close(self) -> None:
        await self._pool.aclose()

    async def _send(self, route: Route, arguments: Mapping[str, object], attempts: int, timeout_s: float | None) -> str:
        """Return the text of the answer. Raises as `EngineClient.call`."""
        kind: type[EngineError] = RefusedError
        for attempt in range(1, attempts + 1):
            try:
                # After an unexpected error in its application, uvicorn closes the connection, but not at once. The next
                # call over it would be lost, and for good if it can't be repeated.
                status, answer = await self._exchange(route, arguments, timeout_s, last=attempts == 1)
                break
            except (*_FINAL, httpcore.NetworkError, httpcore.RemoteProtocolError) as error:
                if not isinstance(error, _NOT_SENT):
                    kind = UnansweredError
                if isinstance(error, _FINAL) or attempt == attempts:
                    reason = f"{type(error).__name__} {error}".rstrip()
                    if isinstance(error, TimeoutError):
                        reason = f"not within {timeout_s or BODY_S:g} s"
                    raise kind(f"{self.where}{route.path} did not answer: {reason}") from error
            await anyio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        if 200 <= status < 300:
            return answer
        quoted = answer.strip()[:QUOTED_MAX]
        refused = CallNotBegun if status in _NOT_BEGUN else CallRefused
        raise refused(f"{self.where}{route.path} answered {status}: {quoted}", status, quoted)

    async def _exchange(
        self, route: Route, arguments: Mapping[str, object], timeout_s: float | None, *, last: bool
    ) -> tuple[int, str]:
        """One request: its status and the text of its answer. If `last`, the server is to close the connection."""
        target, body, headers = route.path, None, [*self._headers]
        if route.query and arguments:
            target += ("&" if "?" in target else "?") + _query(arguments)
        if route.verb == "POST":
            body = b"" if route.query else _body(arguments)
        if body:
            headers.append((b"Content-Type", b"application/json"))
        if last:
            headers.append((b"Connection", b"close"))
        own = self._url
        path = own.target.rstrip(b"/") + quote(target, safe=_NOT_QUOTED).encode()
        url = httpcore.URL(scheme=own.scheme, host=own.host, port=own.port, target=path)
        content = bytearray()
        with anyio.fail_after(timeout_s):
            async with self._pool.stream(
                route.verb, url, headers=headers, content=body, extensions=self._limits
            ) as answer:
                if any(name.lower() == b"content-encoding" and value != b"identity" for name, value in answer.headers):
                    encoded = "in an encoding that was not asked for. It was not read."
                    raise UnansweredError(f"{self.where}{route.path} answered {encoded}")
                with anyio.fail_after(BODY_S) as reading:
                    async for part in answer.aiter_stream():
                        content += part
                        if len(content) > ANSWER_BYTES:
                            reading.cancel()  # ends httpcore's generators where they wait; a break would leave them
        if len(content) > ANSWER_BYTES:
            large = f"more than {ANSWER_BYTES:,} bytes. It was not read on."
            raise UnansweredError(f"{self.where}{route.path} answered {large}")
        return answer.status, content.decode(errors="replace")


class HttpClient(HttpReader):
    """An `EngineClient` of one server. Made of the same arguments as its reader."""

    def _offers(self, route: Route) -> bool:
        return True

    async def call(self, method: str, /, **arguments: object) -> object:
        route = self._routes[method]
        named = {route.renamed.get(name, name): value for name, value in arguments.items()}
        attempts = ATTEMPTS if route.repeatable else 1
        return _result(route, await self._send(route, named, attempts, route.timeout_s))

    async def parameters(self, method: str, /, *names: str) -> frozenset[str]:
        """Send values that no type accepts: the route itself names its parameters in its refusal."""
        route = self._routes[method]
        try:
            await self._send(route, dict.fromkeys(names, UNREADABLE), 1, route.timeout_s)
        except CallRefused as error:
            if error.status not in (400, 422):
                raise
            return frozenset(name for name in names if re.search(rf"\bquery\W+{name}\b", error.body))
        return frozenset()

    async def delete(self, path: str) -> None:
        """Delete what is at a path. Raises CallRefused, with status 404 if it is already gone, and EngineError."""
        await self._send(Route("DELETE", path), {}, ATTEMPTS, READ_TIMEOUT_S)


def base_url(url: str, whose: str = "engine", variable: str = KEY_VARIABLE) -> str:
    """Return the URL of `whose` server without a trailing slash. Its key is in `variable`. Raises ConfigError."""
    place = url.partition("://")[2].partition("/")[0]
    if "@" in place:
        host = place.rpartition("@")[2].partition(":")[0]
        raise ConfigError(f"{whose} URL for {host} must not contain credentials. Set {variable} instead.")
    try:
        parsed = urlsplit(url)
        port = parsed.port
    except ValueError as error:
        raise ConfigError(f"{whose} URL {url!r}: {error}. Give http://HOST:PORT.") from None
    usable = parsed.scheme in ("http", "https") and parsed.hostname and port != 0 and not parsed.query
    if not usable or not url.isascii():
        raise ConfigError(f"{whose} URL {url!r}: give http://HOST:PORT, or https.")
    return f"{parsed.scheme}://{parsed.netloc}{parsed.path}".rstrip("/")


def _body(arguments: Mapping[str, object]) -> bytes:
    return json.dumps(dict(arguments), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _query(arguments: Mapping[str, object]) -> str:
    """The arguments in a URL: lists repeat their name, and booleans look as in JSON."""
    given = {name: value if isinstance(value, list | tuple) else [value] for name, value in arguments.items()}
    return urlencode({name: [_in_url(value) for value in values] for name, values in given.items()}, doseq=True)


def _in_url(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _json(answer: str) -> Any:
    """The content of a JSON text; the text itself if it is none, or too deep."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer


def _result(route: Route, text: str) -> object:
    answer = _json(text)
    if route.answer is not None and isinstance(answer, dict):
        return answer.get(route.answer)
    return answer


def _parameters(declared: Mapping[str, object], document: Mapping[str, object]) -> frozenset[str]:
    """Names of the query parameters and body fields that an operation of an openapi document declares."""
    parameters = [entry for entry in list_at(declared, "parameters") if isinstance(entry, Mapping)]
    names = {text_at(entry, "name") for entry in parameters if entry.get("in") == "query"}
    content = mapping_at(mapping_at(declared, "requestBody"), "content")
    schema = mapping_at(mapping_at(content, "application/json"), "schema")
    schemas = mapping_at(mapping_at(document, "components"), "schemas")
    for option in (schema, *list_at(schema, "anyOf")):
        if isinstance(option, Mapping):
            _, _, name = (text_at(option, "$ref") or "").rpartition("/")
            names.update(mapping_at(mapping_at(schemas, name) or option, "properties"))
    return frozenset(name for name in names if name is not None)
