"""The shell of the gateway: an HTTP server with a base URL for each replica.

`routes` says what a request means, `updates.decide` what follows from it, and `posts` carries that out. Requests for
the engine itself go through `passing`, and nothing of them is kept.
"""

import secrets
import socket
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import httpx
import msgspec
import uvicorn
from anyio import CancelScope
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from controlplane.plane import ControlPlane
from controlplane.trainers.gateway import routes
from controlplane.trainers.gateway.passing import PassedOn
from controlplane.trainers.gateway.posts import Posts, status_of
from schemas.carriers.sockets import is_local
from schemas.errors import (
    AddressInUse,
    ConfigError,
    RolloutctlError,
)
from schemas.logs import logger_of

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logger_of("gateway")

BODY_BYTES_MAX: Final = 1024 * 1024
"""Largest body of a request that is answered here. What is passed on has no limit: it is not kept."""
MOMENT_S: Final = 2.0
"""How long the first update waits for those of the other replicas."""
KEEP_ALIVE_S: Final = 60
"""Time for which an idle connection stays open: longer than a client keeps one before it uses it again."""
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


class Addressed(NamedTuple):
    """What a request is about: a replica, or the gateway itself (None), and the path below its base URL."""

    replica: int | None
    path: str


class Gateway:
    """Answers a trainer's posts to its engines, by commands on the bus.

    Args:
        plane: The open control plane of the run.
        replicas: How many replicas there are; their indices are 0, 1, 2 …
        checkpoints: Root of the checkpoints, as the trainer names it. The plane's own root must be the same folder.
        engines: Base URL of each replica's engine, by index, for requests that are passed on; empty to refuse those.
        engine_key: API key of the engines.
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.
        ports: Listen on a port for each replica too, `port + 1 + replica`, for trainers whose addresses have no path.
        token: What a client must send as `Authorization: Bearer …`; None for no such check.
        insecure: Allow an address that other machines can reach without a token.
        timeout_s: For each phase of a sync.
        moment_s: How long the first update waits for those of the other replicas.

    Raises:
        ConfigError: A value is wrong, or other machines could command the engines.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        replicas: int,
        checkpoints: Path,
        engines: Sequence[str] = (),
        engine_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        ports: bool = False,
        token: str | None = None,
        insecure: bool = False,
        timeout_s: float = 300.0,
        moment_s: float = MOMENT_S,
    ) -> None:
        if engines and len(engines) != replicas:
            raise ConfigError(f"{len(engines)} engines are named, and there are {replicas} replicas: name one for each")
        if wrong := [url for url in engines if not url.startswith(("http://", "https://"))]:
            raise ConfigError(f"the engine {wrong[0]!r} is no URL: it must begin with http:// or https://")
        if not (token or insecure or is_local(f"tcp://{host}:{port}")):
            raise ConfigError(
                f"refused to listen on {host!r}: other machines can reach it, and without a token anybody on them "
                "could command the engines. Give a token file, listen on 127.0.0.1, or say --insecure on a network "
                "that you trust"
            )
        self._plane, self._replicas = plane, replicas
        self._root = checkpoints.absolute()
        self._roots = tuple(dict.fromkeys((str(self._root), str(self._root.resolve()))))
        self._engines, self._engine_key = [url.rstrip("/") for url in engines], engine_key
        self._token = token
        self._posts = Posts(plane, replicas, self._root, timeout_s, moment_s)
        self._sockets = _listen(host, [port, *(_port_of(port, replica) for replica in range(replicas if ports else 0))])
        self._replica_of = {sock.getsockname()[1]: replica for replica, sock in enumerate(self._sockets[1:])}
        self._host, self._port = host, self._sockets[0].getsockname()[1]
        self._http: httpx.AsyncClient

    # --- addresses ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL of the gateway itself, which has `/workers`."""
        return f"http://{_in_url(self._host)}:{self._port}"

    def base_urls(self, host: str | None = None) -> list[str]:
        """Return the base URL of each replica.

        Args:
            host: The gateway's, as its client knows it; None for the address that it listens on.
        """
        name = _in_url(host or self._host)
        if self._replica_of:
            return [f"http://{name}:{port}" for port in self._replica_of]
        return [f"http://{name}:{self._port}/replica/{replica}" for replica in range(self._replicas)]

    def _place(self, request: Request) -> Addressed:
        path = request.url.path
        replica = self._replica_of.get((request.scope.get("server") or ("", 0))[1])
        if replica is not None:
            return Addressed(replica, f"/{path.lstrip('/')}")
        first, _, rest = path.lstrip("/").partition("/")
        index, _, below = rest.partition("/")
        if first == "replica" and index.isdecimal() and len(index) < 8 and int(index) < self._replicas:
            return Addressed(int(index), f"/{below.lstrip('/')}")
        return Addressed(None, path)

    # --- lifetime -----------------------------------------------------------------------------------------------------

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled. Posts that still wait are then answered 503; the syncs of the bus go on."""
        methods = list(METHODS)
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        server = _Server(config)
        # The trainer's own time-outs are those of what is passed on.
        timeout = httpx.Timeout(None, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with (
            httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False) as self._http,
            anyio.create_task_group() as listening,
        ):
            try:
                listening.start_soon(_serve_shielded, server, self._sockets)
                task_status.started()
                await self._posts.serve()
            finally:
                server.should_exit = True

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        if self._token is not None and not _has_token(request, self._token):
            return _json(401, "the gateway asks for its token: send it as `Authorization: Bearer TOKEN`")
        try:
            return await self._of_place(request, *self._place(request))
        except RolloutctlError as error:  # the bus has ended
            return _json(status_of(error), str(error))

    async def _of_place(self, request: Request, replica: int | None, path: str) -> Response:
        if replica is None:
            if (request.method, path) == ("GET", "/workers"):
                return JSONResponse({"workers": [{"url": url} for url in self.base_urls(request.url.hostname)]})
            known = f"/workers, and the routes of an engine below {' '.join(self.base_urls(request.url.hostname))}"
            return _json(400, f"{request.method} {path} is refused: it is about no replica. There are {known}")
        passed = routes.is_passed(request.method, path)
        if passed is not None:
            return self._pass_on(request, replica, path, generates=passed.generates)
        try:
            body, fields = await _fields(request)
        except ValueError as error:
            return _json(413 if "larger" in str(error) else 400, f"{request.method} {path} is refused: {error}")
        meaning = routes.read_request(request.method, path, fields, self._roots)
        match meaning:
            case routes.RefusedPost(message):
                logger.warning("replica %d: %s", replica, message)
                return _json(400, message)
            case routes.WorkersRead():
                return JSONResponse({"workers": [{"url": url} for url in self.base_urls(request.url.hostname)]})
            case routes.HealthRead():
                if reason := self._posts.unfit(replica):
                    return _json(503, f"replica {replica} does not serve: {reason}")
                return self._pass_on(request, replica, path, body=body) if self._engines else _json(200, "it serves")
            case routes.VersionRead():
                return await self._version_of(replica, path)
            case routes.TransferPost():
                self._posts.note_transfer(replica, meaning)
                return self._pass_on(request, replica, path, body=body)
            case _:
                return _json(*await self._posts.answer(replica, meaning, request.is_disconnected))

    # --- the engine's own answers -------------------------------------------------------------------------------------

    def _pass_on(
        self, request: Request, replica: int, path: str, *, body: bytes | None = None, generates: bool = False
    ) -> Response:
        if not self._engines:
            return _json(400, f"{path} is for the engine: start the gateway with `--engine URL` for each replica")
        if generates and (version := self._posts.quarantined(replica)):
            return _json(503, f"replica {replica} is quarantined since v{version}, and answers no requests")
        key = self._engine_key
        return PassedOn(
            self._http,
            request,
            f"{self._engines[replica]}{path}",
            body=body,
            authorization=f"Bearer {key}" if key else None,
            keeps_authorization=key is None and self._token is None,
        )

    async def _version_of(self, replica: int, path: str) -> Response:
        """The engine's answer, with the trainer's label in place of the number of the bus.

        SGLang 0.5.23 has no `/get_weight_version` any more, so it is not asked for it.
        """
        serving, label = self._plane.serving().get(replica), self._posts.label_of(replica)
        known: dict[str, object] = {"weight_version": label} if label else {}
        if not self._engines or (known and path == "/get_weight_version"):
            return JSONResponse({"weight_version": "unknown" if serving is None else str(serving), **known})
        headers = {"authorization": f"Bearer {self._engine_key}"} if self._engine_key else {}
        try:
            found = await self._http.get(f"{self._engines[replica]}{path}", headers=headers, timeout=30.0)
            if found.status_code != 200:
                return Response(found.content, found.status_code, media_type=found.headers.get("content-type"))
            return JSONResponse({**found.json(), **known})
        except (httpx.HTTPError, ValueError, TypeError) as error:
            return _json(502, f"the engine of replica {replica} did not answer {path}: {error}")


class _Server(uvicorn.Server):
    """A server whose signals are the command line's."""

    @contextmanager
    def capture_signals(self) -> "Iterator[None]":
        yield


async def _serve_shielded(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
    with CancelScope(shield=True):  # it ends when it is told to, and closes its connections
        await server.serve(sockets)


def _listen(host: str, ports: list[int]) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for port in ports:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sockets.append(socket.create_server((host, port), family=family, backlog=2048))
    except (OSError, OverflowError) as error:
        for sock in sockets:
            sock.close()
        raise AddressInUse(f"can't listen on {host}:{port}: {error}. Name a free port, or 0 for any") from error
    return sockets


def _port_of(port: int, replica: int) -> int:
    return port + 1 + replica if port else 0


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _has_token(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return secrets.compare_digest(given.encode(), f"Bearer {token}".encode())


async def _fields(request: Request) -> tuple[bytes, dict[str, object]]:
    """Return the body, and the parameters of the query with the fields of the body. Raises ValueError."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"its body is larger than {BODY_BYTES_MAX} bytes")
    content: object = {}
    if body.strip():
        try:
            content = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"its body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("its body is not a JSON object")
    return body, {**dict(request.query_params), **content}


def _json(status: int, message: str) -> Response:
    return JSONResponse({"success": status == 200, "message": message}, status)
