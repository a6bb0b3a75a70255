"""Passes a request on to an engine, and its answer back, piece by piece: no body is ever held as a whole."""

from collections.abc import AsyncIterator, Callable
from typing import Final

import anyio
import httpx
from anyio import CancelScope
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from schemas.logs import logger_of

logger = logger_of("gateway")

HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"host", b"expect"),
    }
)
"""Headers of one connection, which say nothing about the next (RFC 9110, 7.6.1)."""


class ClientGone(httpx.ReadError):
    """A request could not be passed on as a whole. Nothing failed at the engine."""


class ProxyResponse(Response):
    """The engine's own answer to a request. A request whose sender has gone is given up at the engine too.

    Args:
        http: Client of the engines.
        request: The request; its body is unread unless `body` has it.
        url: The engine's URL for it, without the query.
        body: What was read of it already, or what takes its place.
        authorization: Header for the engine, in place of the client's.
        keeps_authorization: The client's header is for the engine, and not for the gateway.
        note: Told whether the engine began to answer, or failed.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        request: Request,
        url: str,
        *,
        body: bytes | None,
        authorization: str | None,
        keeps_authorization: bool,
        note: Callable[[bool], None],
    ) -> None:
        self.background = None
        dropped = HOP_BY_HOP if keeps_authorization else HOP_BY_HOP | {b"authorization"}
        if body is not None:  # it may be another one
            dropped |= {b"content-length"}
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in dropped]
        if authorization is not None:
            headers.append((b"authorization", authorization.encode()))
        self._http, self._sent, self._started, self._note = http, anyio.Event(), False, note
        streams = body is None and ("content-length" in request.headers or "transfer-encoding" in request.headers)
        if not streams:
            self._sent.set()
        self._request = http.build_request(
            request.method,
            httpx.URL(url, query=request.scope["query_string"] or None),
            headers=headers,
            content=self._body(request.receive) if streams else body,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._give_up, receive, tasks.cancel_scope)
                await self._pass(send)
                tasks.cancel_scope.cancel()
        except* httpx.HTTPError as errors:
            (error, *_) = errors.exceptions
            url = self._request.url
            if not isinstance(error, ClientGone):
                self._note(False)
            logger.warning("%s %s: %s: %s", self._request.method, url, type(error).__name__, error)
            if not self._started:  # else the client sees that the answer is cut off
                message = f"the engine at {url} did not answer: {type(error).__name__}: {error}"
                await JSONResponse({"success": False, "message": message}, 502)(scope, receive, send)

    async def _pass(self, send: Send) -> None:
        answer = await self._http.send(self._request, stream=True)
        try:
            headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in HOP_BY_HOP]
            self._started = True
            self._note(True)
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            with CancelScope(shield=True):
                await answer.aclose()

    async def _body(self, receive: Receive) -> AsyncIterator[bytes]:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone("the client has gone")
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                self._sent.set()
                return

    async def _give_up(self, receive: Receive, scope: CancelScope) -> None:
        """Cancel when the client has gone. Its body comes on the same way, so that is read first."""
        await self._sent.wait()
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
