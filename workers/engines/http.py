"""The one HTTP client for engine servers: SGLang's, vLLM's, and the router before them.

Rule 1  What reads has a timeout and is tried again. What changes an engine is sent once, unless its route says that
        doing it twice is doing it once; it has no timeout of its own, because giving up would not take it back. The
        agent's machine reports it as late, and a connection that died is noticed by TCP keep-alive.
Rule 2  An answer that is not 2xx is an error with the status and the server's words.
Rule 3  The key comes from the environment or a file, and is in no message and no log.
"""

import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import anyio
import httpx
from httpx import AsyncClient, AsyncHTTPTransport, Limits, Timeout

from schemas.errors import ConfigError
from workers.engines.client import CallRefused, Methods, Unanswered

READ_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 5.0
ATTEMPTS: Final = 3
BACKOFF_S: Final = 0.2
"""Before the second attempt; doubles, with jitter."""
SAID_MAX: Final = 500
"""Letters of a server's words in an error."""

KEY_VARIABLE: Final = "ROLLOUTCTL_ENGINE_API_KEY"
"""Holds the engine's key; with `_FILE` at its end, the path of a file that does."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class Route(NamedTuple):
    """Where a method of an engine is found on its server.

    query: its arguments go into the URL, else into a JSON body.   answer: key of the JSON answer that holds the result.
    renamed: what the server calls an argument, where that differs.   repeatable: doing it twice is doing it once.
    undeclared: parameters that it reads without saying so in its openapi.json.
    timeout_s: seconds after which nobody waits for the answer any more; None to wait for ever.
    """

    verb: Literal["GET", "POST", "DELETE"]
    path: str
    query: bool = False
    answer: str | None = None
    renamed: Mapping[str, str] = {}
    repeatable: bool = False
    undeclared: frozenset[str] = frozenset()
    timeout_s: float | None = None


class HttpClient:
    """One server. url: http://HOST:PORT.   routes: the engine's methods by name.   key: sent as a bearer token.

    info_path: where it tells how it was launched; 404 there means that this node has no front end.
    Raises ConfigError for a URL that can't be used.
    """

    def __init__(self, url: str, routes: Mapping[str, Route], *, info_path: str, key: str | None = None) -> None:
        self.where = base_url(url)
        self._routes, self._info_path = routes, info_path
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = AsyncClient(
            base_url=self.where,
            headers=headers,
            timeout=Timeout(None, connect=CONNECT_TIMEOUT_S),
            # An idle connection is dropped before uvicorn drops it (5 s): else a call could be sent into its end.
            transport=AsyncHTTPTransport(
                limits=Limits(max_connections=16, keepalive_expiry=3.0), socket_options=_KEEPALIVE
            ),
            trust_env=False,
        )

    async def open(self) -> None:
        """Nothing to do: a server can be called from anywhere."""

    async def methods(self) -> Methods | None:
        """From the server's openapi.json. Raises CallRefused when it has none, Unanswered when it does not answer."""
        try:
            document = await self.get("/openapi.json")
        except Unanswered as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                return None
            raise
        paths, found = document.get("paths", {}), {}
        for name, route in self._routes.items():
            declared = paths.get(route.path, {}).get(route.verb.lower())
            if declared is not None:
                found[name] = _parameters(declared, document) | route.undeclared
        return found

    async def info(self) -> Mapping[str, object] | None:
        """What the server says of its launch; None when it has no such route. Raises EngineError."""
        try:
            return await self.get(self._info_path)
        except CallRefused as error:
            if error.status == 404:
                return None
            raise

    async def call(self, method: str, /, **arguments: object) -> object:
        """One call. Raises CallRefused and Unanswered."""
        route = self._routes[method]
        named = {route.renamed.get(name, name): value for name, value in arguments.items()}
        attempts = ATTEMPTS if route.repeatable else 1
        return _result(route, await self._send(route, named, attempts, route.timeout_s))

    async def read(self, method: str, /) -> object:
        """One call that only reads."""
        route = self._routes[method]
        return _result(route, await self._send(route, {}, ATTEMPTS, READ_TIMEOUT_S))

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path."""
        answer = _json(await self._send(Route("GET", path), {}, ATTEMPTS, READ_TIMEOUT_S))
        return answer if isinstance(answer, dict) else {}

    async def delete(self, path: str) -> None:
        """Ask that what is at a path be gone. Raises CallRefused, with status 404 when it is gone, and Unanswered."""
        await self._send(Route("DELETE", path), {}, ATTEMPTS, READ_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _send(
        self, route: Route, arguments: Mapping[str, object], attempts: int, timeout_s: float | None
    ) -> httpx.Response:
        body = None if route.query or route.verb != "POST" else dict(arguments)
        query: Any = dict(arguments) if route.query else None
        # uvicorn closes a connection after an error that its application did not foresee, in its own time: the call
        # that comes next over it, and can't be made twice, would be lost.
        alone = {"Connection": "close"} if attempts == 1 else None
        for attempt in range(1, attempts + 1):
            try:
                response = await self._client.request(
                    route.verb,
                    route.path,
                    params=query,
                    json=body,
                    headers=alone,
                    timeout=Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
                )
                break
            except httpx.TransportError as error:
                final = isinstance(error, httpx.ConnectError | httpx.TimeoutException)  # nobody listens, or it hangs
                if final or attempt == attempts:
                    raise Unanswered(
                        f"{self.where}{route.path} did not answer: {type(error).__name__} {error}".rstrip()
                    ) from error
            await anyio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        if response.is_success:
            return response
        said = response.text.strip()[:SAID_MAX]
        raise CallRefused(
            f"{self.where}{route.path} answered {response.status_code}: {said}", response.status_code, said
        )


def base_url(url: str, whose: str = "engine", variable: str = KEY_VARIABLE) -> str:
    """The URL without a slash at its end. Raises ConfigError unless it is http(s)://HOST[:PORT] and holds no secret.

    whose, variable: for the error: whose URL it is, and where its key is to be given.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{whose} URL {url!r}: {error}. Give http://HOST:PORT.") from None
    if parsed.userinfo:
        raise ConfigError(f"{whose} URL for {parsed.host}: no name or key belongs into it. Give the key by {variable}.")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise ConfigError(f"{whose} URL {url!r}: give http://HOST:PORT, or https.")
    return str(parsed).rstrip("/")


def api_key(file: Path | None = None, variable: str = KEY_VARIABLE) -> str | None:
    """A key: from `file`, else from the file that `<variable>_FILE` names, else from the variable, else None.

    Raises ConfigError.
    """
    named = os.environ.get(f"{variable}_FILE")
    file = file or (Path(named) if named else None)
    if file is None:
        return os.environ.get(variable) or None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key can't be read from {file}: {error}.") from None
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"{file} holds no key: one line of printable ASCII letters is expected.")
    return key


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _result(route: Route, response: httpx.Response) -> object:
    answer = _json(response)
    if route.answer is not None and isinstance(answer, dict):
        return answer.get(route.answer)
    return answer


def _parameters(declared: Mapping[str, Any], document: Mapping[str, Any]) -> frozenset[str]:
    """Names of query parameters and of the fields of the body that one operation of an openapi document declares."""
    names = {one["name"] for one in declared.get("parameters", ()) if one.get("in") == "query"}
    content = declared.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    for option in (schema, *schema.get("anyOf", ())):
        _, _, name = option.get("$ref", "").rpartition("/")
        named = document.get("components", {}).get("schemas", {}).get(name, option)
        names.update(named.get("properties", {}))
    return frozenset(names)
