"""Small HTTP servers for tests, each on a thread of its own."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

import msgspec


class HttpRequest(NamedTuple):
    """One request.

    Attributes:
        path: With its query.
        token: The bearer token; None without one.
    """

    verb: str
    path: str
    body: bytes
    token: str | None


Reply = tuple[int, object] | None
"""Status and body; bytes and text go out as they are, everything else as JSON. None hangs up without an answer."""


class HttpServer:
    """Answers each request on the loopback with `answer(request)`.

    Attributes:
        requests: Every request, in order.
    """

    def __init__(self, answer: Callable[[HttpRequest], Reply], port: int = 0) -> None:
        server = self
        self.requests: list[HttpRequest] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
                request = HttpRequest(self.command, self.path, body, token)
                server.requests.append(request)
                reply = answer(request)
                if reply is None:
                    self.close_connection = True
                    return
                content = reply[1].encode() if isinstance(reply[1], str) else reply[1]
                data = content if isinstance(content, bytes) else msgspec.json.encode(content)
                self.send_response(reply[0])
                if data is not content:
                    self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """The client has gone: the router does that when it tries gRPC."""

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
