"""Who may connect to a bus with keys: the ZAP handler of its sockets, and the keys that it accepts.

Theory of operation. libzmq asks this handler about every connection, after the peer has proven that it holds the secret
of its key. The answer is one lookup in a dict. When the folder of keys has changed, it is read again in a thread, and
the dict is replaced. So a key that is revoked is refused at its next connection, and by `grant_of` at its next message.

Rule 1  The handler never ends: whatever arrives, and whatever the folder holds, it goes on with the list that it has.
Rule 2  Closed by default: a socket that enforces its domain admits no peer while there is no handler.
"""

from typing import Final

import anyio
import zmq
from anyio import to_thread
from zmq.utils import z85

from controlplane.bus.key_folder import AccessList, KeyFolder
from controlplane.machine.permissions import Grant
from schemas.errors import KeyFileError
from schemas.logs import RateLimit, logger_of
from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.sockets import Context

logger = logger_of("keys")
logger.addFilter(RateLimit())  # any program may try to connect

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ASKED_MAX: Final = 1_000
"""Questions that another thread answers at once."""
_VERSION: Final = b"1.0"


class Access:
    """The keys of one bus while it runs. Raises KeyFileError."""

    def __init__(self, folder: KeyFolder) -> None:
        self._folder = folder
        self._signature = folder.signature()
        self._list: AccessList = folder.access_list()
        self.pair = folder.server_pair()

    def grant_of(self, public: bytes) -> Grant | str:
        """Return what a key may do, or why it may do nothing."""
        key = public.decode("ascii", "replace")
        if grant := self._list.grants.get(key):
            return grant
        if name := self._list.revoked.get(key):
            return f"key {name} was revoked"
        return "this key is not one of the bus's"

    def bind(self, context: Context) -> AsyncZmqSocket:
        """Return the handler's socket. Bind it before the sockets that it guards."""
        sock = context.socket(zmq.ROUTER)
        sock.set(zmq.LINGER, 0)
        try:
            sock.bind(ZAP_ADDRESS)
        except zmq.ZMQError as error:
            sock.close(0)
            raise KeyFileError(
                "the ZeroMQ context given has keys of another bus already: give each bus with keys a context of its own"
            ) from error
        return AsyncZmqSocket(sock, ZAP_ADDRESS)

    async def serve(self, handler: AsyncZmqSocket) -> None:
        """Answer libzmq until cancelled."""
        while True:
            frames = await handler.recv()
            try:
                handler.send_nowait(self._answer(frames))
            except Exception:  # rule 1: a handler that ended would shut all peers out
                logger.exception("a connection was refused, since its request could not be answered")

    def answer_elsewhere(self, handler: AsyncZmqSocket) -> None:
        """Answer what libzmq has asked, in another thread while the handler's own is held up."""
        for _ in range(ASKED_MAX):
            if (frames := handler.take_elsewhere()) is None:
                return
            handler.send_elsewhere(self._answer(frames))

    async def changed(self, interval_s: float) -> bool:
        """Return when the list has been replaced, because the folder has changed, and whether a key lost its grant."""
        while True:
            await anyio.sleep(interval_s)
            before = self._list
            try:
                # The folder may be on a disk that hangs, which must not hold up the end of the bus either.
                if await to_thread.run_sync(self._read, abandon_on_cancel=True):
                    return not before.grants.keys() <= self._list.grants.keys()
            except Exception as error:  # rule 1
                logger.error("the keys can't be read again, and those read before stay valid: %s", error)

    def _read(self) -> bool:
        signature = self._folder.signature()  # before the files: what changes while they are read is read again
        if signature == self._signature:
            return False
        found = self._folder.access_list()
        replaced, self._list, self._signature = found != self._list, found, signature
        return replaced

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """The reply to: sender, b"", version, request id, domain, address, routing id, mechanism, credentials."""
        sender, _, version, request, _, address, _, mechanism, *credentials = frames
        if version != _VERSION or mechanism != b"CURVE" or len(credentials) != 1:
            return [sender, b"", _VERSION, request, b"400", b"keys are needed", b"", b""]
        public = z85.encode(credentials[0])
        grant = self.grant_of(public)
        if isinstance(grant, str):
            logger.warning("refused a connection from %a: %s", address[:64], grant)
            return [sender, b"", _VERSION, request, b"400", grant.encode(), b"", b""]
        return [sender, b"", _VERSION, request, b"200", b"OK", public, b""]
