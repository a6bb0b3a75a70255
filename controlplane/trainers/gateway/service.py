"""The shell of the gateway: an HTTP server with a base URL for each replica.

`routes` says what a request means, and `posts` does what follows from it. Requests for the engine itself go through
`passing`, and nothing of them is kept.
"""

import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import httpx
import msgspec
from anyio import CancelScope
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from controlplane.bus.binding import warn_in_red
from controlplane.machine.events import OnUnreachable
from controlplane.plane import ControlPlane
from controlplane.trainers.gateway import discovery, routes
from controlplane.trainers.gateway.adapters import replica_that_holds, with_engine_names
from controlplane.trainers.gateway.connections import REASON, BoundedServer, connections_within_limit
from controlplane.trainers.gateway.discovery import Membership, worker_row, world_size
from controlplane.trainers.gateway.passing import ProxyResponse
from controlplane.trainers.gateway.posts import Posts, status_of, verdicts
from schemas.errors import AddressInUse, ConfigError, RolloutctlError
from schemas.formatting import printable
from schemas.logs import logger_of
from schemas.transport.forks import listening
from schemas.transport.sockets import is_local
from schemas.wire import DECODE_ERRORS

logger = logger_of("gateway")

BODY_BYTES_MAX: Final = 1024 * 1024
"""Largest body of a request that is answered here. What is passed on unread has no limit: it is not kept."""
TOKENS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest body of a request for tokens while the run has adapters: it is read for their names."""
REASON_MAX: Final = 600
"""Characters of a message in the status line."""
MOMENT_S: Final = 2.0
"""How long the first update waits for those of the other replicas."""
MODEL_S: Final = 5.0
"""Time for a server to name its model."""
FAILURES_MAX: Final = 3
SUSPECT_S: Final = 5.0
"""For how long a replica gets no requests after that many of them failed in a row."""
RETRY_AFTER_S: Final = "5"
"""For what passes by itself, such as an agent that restarts."""
NO_ENGINE: Final = (
    "{} is for the engine: start agents with `--url`, or the gateway with `--engine URL` for each replica"
)


class Gateway:
    """Answers a trainer's posts to its engines, by commands on the bus. Raises ConfigError.

    The arguments are the options of `rolloutctl gateway`. The root of the plane's own checkpoints is `checkpoints`, as
    the trainer names it. Without `engines`, agents say where these are. Port 0 lets the system choose; with `ports`,
    each replica has one of its own, `port + 1 + replica`. The first update waits `moment_s` for those of the others.
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
        quorum: int | None = None,
        absent: OnUnreachable = "skip",
    ) -> None:
        if engines and len(engines) != replicas:
            raise ConfigError(f"{len(engines)} engines are named, and there are {replicas} replicas: name one for each")
        if (quorum or 0) > replicas:
            raise ConfigError(f"quorum is {quorum}, and there are {replicas} replicas: no update would ever meet it")
        if wrong := [url for url in engines if not url.startswith(("http://", "https://"))]:
            raise ConfigError(f"the engine {wrong[0]!r} is no URL: it must begin with http:// or https://")
        exposed = not (token or is_local(f"tcp://{host}:{port}"))
        if exposed and not insecure:
            raise ConfigError(
                f"refused to listen on {host!r}: other machines can reach it, and without a token any program on them "
                "could command the engines. Give a token file, listen on 127.0.0.1, or say --insecure on a network "
                "that you trust"
            )
        self._plane, self._replicas = plane, replicas
        self._root = checkpoints.absolute()
        self._roots = tuple(dict.fromkeys((str(self._root), str(self._root.resolve()))))
        self._engines, self._engine_key = [url.rstrip("/") for url in engines], engine_key
        self._token = token
        limits = {"timeout": timeout_s, "quorum": quorum, "on_unreachable": absent}
        self._posts = Posts(plane, replicas, self._root, moment_s, limits)
        more = range(1, replicas + 1 if ports else 1)
        self._sockets = _listen(host, [port, *(port + number if port else 0 for number in more)])
        listening.update(sock.getsockname()[1] for sock in self._sockets)  # until the process ends
        self._replica_of = {sock.getsockname()[1]: replica for replica, sock in enumerate(self._sockets[1:])}
        self._host, self._port = host, self._sockets[0].getsockname()[1]
        self._connections = connections_within_limit(plane.view().state.settings.agents_max)
        if exposed:
            warn_in_red(
                f"INSECURE: every program that can reach {self.url} can command the engines and load weights "
                "into them. Give a token file instead of --insecure"
            )
        self._models: dict[str, str] = {}  # by the URL of the engine
        self._membership = Membership()
        self._failures: dict[int, tuple[int, float]] = {}  # of passed requests in a row, and when the last one was
        self._http: httpx.AsyncClient

    # --- addresses ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL of the gateway itself, which has `/workers`."""
        return f"http://{_in_url(self._host)}:{self._port}"

    def base_urls(self, host: str | None = None) -> list[str]:
        """Return the base URL of each replica, by the gateway's host as its client knows it."""
        name = _in_url(host or self._host)
        if self._replica_of:
            return [f"http://{name}:{port}" for port in self._replica_of]
        return [f"http://{name}:{self._port}/replica/{replica}" for replica in range(self._replicas)]

    def _place(self, request: Request) -> tuple[int | None, str]:
        """The replica that a request is about, or None for the gateway itself, and the path below its base URL."""
        path = request.url.path
        replica = self._replica_of.get((request.scope.get("server") or ("", 0))[1])
        if replica is not None:
            return replica, f"/{path.lstrip('/')}"
        first, _, rest = path.lstrip("/").partition("/")
        index, _, below = rest.partition("/")
        if first == "replica" and index.isdecimal() and len(index) < 8 and int(index) < self._replicas:
            return int(index), f"/{below.lstrip('/')}"
        return None, path

    # --- lifetime -----------------------------------------------------------------------------------------------------

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled. Posts that still wait are then answered 503; the syncs of the bus go on."""
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])
        server = BoundedServer(app, self._connections)
        # The trainer's own time-outs are those of what is passed on.
        timeout = httpx.Timeout(None, connect=10.0)
        limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=64)
        async with (
            httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False) as self._http,
            anyio.create_task_group() as tasks,
        ):
            try:
                tasks.start_soon(_serve_shielded, server, self._sockets)
                task_status.started()
                await self._posts.serve()
            finally:
                server.should_exit = True

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if self._token is not None and not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
            return _json(401, "the gateway asks for its token: send it as `Authorization: Bearer TOKEN`")
        if self._token is None and _is_of_a_page(request):
            return _json(403, "the gateway takes nothing from pages in a browser, unless they have its token")
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            return _json(400, "a request has Content-Length or Transfer-Encoding, and not both")
        try:
            replica, path = self._place(request)
            if replica is None:
                return await self._of_gateway(request, path)
            return await self._of_replica(request, replica, path)
        except RolloutctlError as error:  # the bus has ended
            return _json(status_of(error), str(error))
        except ClientDisconnect:
            return Response(status_code=400)  # the client has gone
        except Exception as error:
            logger.exception("a request could not be answered")
            return _json(500, f"the gateway has failed, see its log: {type(error).__name__}")

    async def _of_gateway(self, request: Request, path: str) -> Response:
        match request.method, path:
            case "GET", "/workers":
                return self._workers(request)
            case "GET", "/v1/rl/workers":
                return JSONResponse(await self._discovery(request, range(self._replicas)))
            case "GET", path if path.startswith("/v1/rl/workers/"):
                rows = (await self._discovery(request, range(self._replicas)))["workers"]
                row = next((row for row in rows if path == f"/v1/rl/workers/{row['id']}"), None)
                return JSONResponse(row) if row is not None else _json(404, f"{path}: there is no such replica here")
            case "POST", "/v1/rl/syncs":
                return await self._of_replica(request, 0, path)  # whichever: it is about all of them
        below = " ".join(self.base_urls(request.url.hostname))
        known = f"GET /workers, GET /v1/rl/workers(/ID), POST /v1/rl/syncs, and the routes of an engine below {below}"
        return _json(400, f"{request.method} {path} is refused: it is about no replica. There are {known}")

    async def _of_replica(self, request: Request, replica: int, path: str) -> Response:
        passed = routes.is_passed(request.method, path)
        try:
            if passed is not None:
                return await self._pass_on_as_named(request, replica, path, generates=passed == "tokens")
            body, fields = await _fields(request)
        except ValueError as error:
            status = 413 if isinstance(error, BodyTooLarge) else 400
            return _json(status, f"{request.method} {path} is refused: {error}")
        return await self._respond(request, replica, path, body, fields)

    async def _respond(
        self, request: Request, replica: int, path: str, body: bytes, fields: dict[str, object]
    ) -> Response:
        meaning = routes.read_request(request.method, path, fields, self._roots)
        match meaning:
            case routes.RefusedPost(message):
                logger.warning("%s%s", "" if path == "/v1/rl/syncs" else f"replica {replica}: ", message)
                return _json(400, message)
            case routes.Plain.DISCOVERY:
                return JSONResponse(await self._discovery(request, [replica]))
            case routes.Plain.HEALTH if reason := self._unfit(replica):
                return _json(503, f"replica {replica} does not serve: {reason}")
            case routes.Plain.HEALTH if not self._engine(replica):
                return _json(200, "it serves")
            case routes.Plain.HEALTH:
                return self._pass_on(request, replica, path, body=body)
            case routes.Plain.VERSION:
                return await self._version_of(request, replica, path)
            case routes.Plain.INFO:
                url = request.url
                address = {"host": url.netloc.removesuffix(f":{url.port}"), "port": url.port or 80}
                return await self._answer_with(request, replica, path, address)
            case routes.SyncPost():
                return await self._sync(request, meaning)
            case routes.TransferPost():
                self._posts.local = meaning.path
                return self._pass_on(request, replica, path, body=body)
        status, message = await self._posts.answer(replica, meaning, request.is_disconnected)
        if status == 200 and path == "/collective_rpc":  # prime-rl compares the whole answer
            return JSONResponse({"results": [None] * (world_size(self._plane.view(), replica) or 1)})
        more = {**fields, "status": routes.DONE[path], "body": fields} if path in routes.DONE else {}
        return _json(status, message, more)

    async def _sync(self, request: Request, post: routes.SyncPost) -> Response:
        quorum = post.limits.get("quorum")
        if isinstance(quorum, int) and quorum > self._replicas:
            return _json(400, f"quorum is {quorum}, and there are {self._replicas} replicas. Nothing was done")
        answer, report = await self._posts.sync(post, request.is_disconnected)
        if report is None:
            return _json(*answer)
        return _json(*answer, {"status": report.status, "version": report.version, "workers": verdicts(report)})

    def _unfit(self, replica: int) -> str:
        """Why a replica gets no requests; empty if it gets them."""
        failed, tried_s = self._failures.get(replica, (0, 0.0))
        suspect = failed >= FAILURES_MAX and anyio.current_time() - tried_s < SUSPECT_S
        seen = f"its server failed {failed} requests in a row, as seen from here" if suspect else ""
        return self._plane.view().unfit(replica) or seen

    def _note(self, replica: int, answered: bool) -> None:
        """Count what its server failed in a row."""
        failed, _ = self._failures.pop(replica, (0, 0.0))
        if not answered:
            self._failures[replica] = failed + 1, anyio.current_time()

    def _workers(self, request: Request) -> Response:
        """The base URLs of the replicas that may get requests."""
        urls = enumerate(self.base_urls(request.url.hostname))
        return JSONResponse({"workers": [{"url": url} for replica, url in urls if not self._unfit(replica)]})

    async def _discovery(self, request: Request, replicas: Sequence[int]) -> dict[str, Any]:
        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                if self._engine(replica) not in self._models:
                    tasks.start_soon(self._find_model, request, replica)
        view, urls = self._plane.view(), self.base_urls(request.url.hostname)
        self._membership = self._membership.now(view)
        versions = {replica: None if self._unfit(replica) else self._version(replica) for replica in replicas}
        rows = [
            worker_row(view, replica, urls[replica], self._models.get(self._engine(replica)), versions[replica])
            for replica in replicas
            if f"{replica}.0" not in view.state.retired
        ]
        head = {"protocol_version": discovery.VERSION, "namespace": discovery.NAMESPACE}
        return {**head, "workers": rows, "total": len(rows), "membership_epoch": self._membership.epoch}

    async def _find_model(self, request: Request, replica: int) -> None:
        """Learn the name that its server has for its model. It is kept, for when the server is down."""
        with suppress(httpx.HTTPError, ValueError, TypeError, LookupError):
            found = await self._get(request, replica, "/v1/models", MODEL_S)
            self._models[self._engine(replica)] = str(found.json()["data"][0]["id"])

    # --- the engine's own answers -------------------------------------------------------------------------------------

    def _engine(self, replica: int) -> str:
        """Base URL of the server of a replica: as it was named here, else as its agent says; empty if neither."""
        return self._engines[replica] if self._engines else self._plane.view().endpoint(replica)

    def _pass_on(self, request: Request, replica: int, path: str, *, body: bytes | None = None) -> Response:
        if not (engine := self._engine(replica)):
            return _json(400, NO_ENGINE.format(path))
        key = self._engine_key
        return ProxyResponse(
            self._http,
            request,
            f"{engine}{path}",
            body=body,
            authorization=f"Bearer {key}" if key else None,
            keeps_authorization=key is None and self._token is None,
            note=partial(self._note, replica),
        )

    async def _pass_on_as_named(self, request: Request, replica: int, path: str, *, generates: bool) -> Response:
        """Pass a request on; one for tokens with the engines' names of adapters, to a replica that holds them."""
        view, engine = self._plane.view(), self._engine(replica)
        if generates and (reason := self._unfit(replica)):
            return _json(503, f"replica {replica} answers no requests: {reason}")
        if not (generates and engine and view.state.adapters):
            return self._pass_on(request, replica, path)
        try:
            body, named = with_engine_names(view.state, await _body(request, TOKENS_BYTES_MAX))
        except LookupError as error:
            return _json(404, str(error.args[0]))
        taker = replica_that_holds(view, named, replica, self._replicas)
        if taker is None:
            models = ", ".join(used.adapter.model for used in named)
            return _json(503, f"no replica that answers requests holds {models} now")
        return self._pass_on(request, taker, path, body=body)

    async def _version_of(self, request: Request, replica: int, path: str) -> Response:
        """The engine's answer, with the trainer's label in place of the number of the bus.

        SGLang 0.5.23 has no `/get_weight_version` any more, so it is not asked for it.
        """
        label = self._posts.label_of(replica)
        if not self._engine(replica) or (label and path == "/get_weight_version"):
            return JSONResponse({"weight_version": self._version(replica)})
        return await self._answer_with(request, replica, path, {"weight_version": label} if label else {})

    def _version(self, replica: int) -> str:
        """The trainer's label of the weights that a replica serves, else the number of the run."""
        return self._posts.label_of(replica) or str(self._plane.serving().get(replica, "unknown"))

    async def _answer_with(self, request: Request, replica: int, path: str, known: dict[str, object]) -> Response:
        """The engine's answer with what is known better here."""
        if not self._engine(replica):
            return _json(400, NO_ENGINE.format(path))
        try:
            found = await self._get(request, replica, path, 30.0)
            if found.status_code != 200:
                return Response(found.content, found.status_code, media_type=found.headers.get("content-type"))
            return JSONResponse({**found.json(), **known})
        except (httpx.HTTPError, ValueError, TypeError) as error:
            return _json(502, f"the engine of replica {replica} did not answer {path}: {error}")

    async def _get(self, request: Request, replica: int, path: str, timeout_s: float) -> httpx.Response:
        """Ask an engine, with the query and the key that a request passed on to it would have."""
        given = request.headers.get("authorization") if self._token is None else None
        authorization = f"Bearer {self._engine_key}" if self._engine_key else given
        url = httpx.URL(f"{self._engine(replica)}{path}", query=request.scope["query_string"] or None)
        headers = {"authorization": authorization} if authorization else {}
        return await self._http.get(url, headers=headers, timeout=timeout_s)


async def _serve_shielded(server: BoundedServer, sockets: list[socket.socket]) -> None:
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


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_of_a_page(request: Request) -> bool:
    """Whether a page in a browser makes this request: any site's may, to a server on the same machine."""
    return "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none"


async def _fields(request: Request) -> tuple[bytes, dict[str, object]]:
    """Return the body, and the parameters of the query with the fields of the body. Raises ValueError."""
    body = await _body(request, BODY_BYTES_MAX)
    content: dict[str, object] = {}
    if body.strip():
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ValueError(f"its body must be JSON, and its Content-Type application/json, not {kind[:80]!r}")
        try:
            content = msgspec.json.decode(body, type=dict[str, object])
        except DECODE_ERRORS as error:
            raise ValueError(f"its body is not a JSON object: {error}") from None
    return body, {**dict(request.query_params), **content}


class BodyTooLarge(ValueError):
    """A body that is answered here is bounded."""


async def _body(request: Request, bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise BodyTooLarge(f"its body is larger than {bytes_max} bytes")
    return bytes(body)


def _json(status: int, message: str, more: Mapping[str, object] = {}) -> Response:
    """An answer that says why in all places where a client may look: SkyRL shows `error.message` alone."""
    message = printable(message)
    content: dict[str, object] = {**more, "success": status == 200, "message": message}
    if status == 200:
        return JSONResponse(content)
    reason = " ".join(message.split())[:REASON_MAX].rstrip().encode("ascii", "replace").decode()
    headers = {REASON.decode(): reason} | ({"retry-after": RETRY_AFTER_S} if status == 503 else {})
    return JSONResponse({**content, "error": {"message": message, "code": status}}, status, headers)
