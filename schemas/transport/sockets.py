"""The four sockets of the bus and its agents: their options, limits and addresses.

Two rules keep a peer from aborting this process. libzmq 4.3.5 stops reading from a connection while the queue behind it
is full. If the peer then disconnects, and a ZMTP heartbeat falls due or a PING of the peer lies behind the full queue,
libzmq fails an assertion (`!_io_error` in stream_engine_base.cpp) and calls `abort`.

Rule 1  No queue for received messages is ever full: RCVHWM is 0. A socket's owner reads it as fast as it can.
Rule 2  No ZMTP heartbeats. Agents and bus have heartbeats of their own; the kernel finds dead hosts.
"""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import zmq

from schemas.errors import AddressInUse, BusAddressError
from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.handshakes import DialledSocket, use_keys
from schemas.transport.keys import Credentials, KeyPair
from schemas.transport.publisher_socket import PublisherSocket

Context = zmq.Context[zmq.Socket[bytes]]
S = TypeVar("S", bound=AsyncZmqSocket)

# A peer that sends a larger frame is disconnected by libzmq. The decoder checks the number of frames.
SUBSCRIPTION_BYTES_MAX: Final = 512  # a frame from a subscriber, which only sends its key and topics
SUBSCRIPTIONS_UNREAD_MAX: Final = 1  # bytes of a subscriber in the kernel, which takes at least about 2 kB
FRAME_BYTES_MAX: Final = 256 * 1024  # a frame on every other socket
EVENTS_QUEUED_MAX: Final = 1000  # messages per subscriber before the publisher drops; a resend repairs the hole
CONTROL_QUEUED_MAX: Final = 256  # messages to one peer between an agent and the router
LINGER_MS: Final = 2000  # time for a closed socket to deliver what it has queued
HANDSHAKE_MS: Final = 5000  # time for a connection to open, and then for its handshake
REDIAL_MS: Final = 200  # pause before libzmq dials again; doubles, with jitter
REDIAL_MS_MAX: Final = 4000
DEAD_HOST_MS: Final = 15_000  # time after which the kernel gives up a host that acknowledges nothing

ZAP_DOMAIN: Final = b"rolloutctl"

_EXAMPLES: Final = "An address looks like tcp://127.0.0.1:5555, tcp://127.0.0.1:0 (any free port) or ipc:///run/me/bus"


def bus_publisher(
    context: Context, address: str, *, insecure: bool = False, pair: KeyPair | None = None
) -> PublisherSocket:
    """Bind the XPUB socket that carries commands and heads.

    A stalled reader must not slow the others down, so the socket drops its messages at EVENTS_QUEUED_MAX. `recv`
    returns one frame per change of a subscription, b"\\x01topic" or b"\\x00topic". Read them, or they accumulate.
    Raises AddressInUse or BusAddressError.

    Args:
        context: ZeroMQ context.
        address: `tcp://127.0.0.1:0` lets the system choose a port; the result is in `.address`.
        insecure: Allow an address that other machines can reach, without keys.
        pair: Key of the bus. Then only peers come in that a ZAP handler of the context lets in.
    """
    sock = context.socket(zmq.XPUB)
    sock.set(zmq.XPUB_VERBOSER, 1)
    sock.set(zmq.XPUB_NODROP, 0)
    sock.set(zmq.ONLY_FIRST_SUBSCRIBE, 1)
    sock.set(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX)
    # libzmq keeps every topic, in memory of fifty times its size. So topics must not come fast: then who sends a wrong
    # one is cut off in time.
    sock.set(zmq.RCVBUF, SUBSCRIPTIONS_UNREAD_MAX)
    return _bind(PublisherSocket, sock, address, EVENTS_QUEUED_MAX, insecure, pair)


def bus_router(
    context: Context, address: str, *, insecure: bool = False, pair: KeyPair | None = None
) -> AsyncZmqSocket:
    """Bind the ROUTER socket for messages to and from each agent. Each begins with the routing id of its connection.

    The router itself makes a routing id for each connection, so a new connection never meets the queue of an old one,
    and no peer can pose as another connection. A peer could ask for an id of its own; without HANDOVER it gets none
    that is in use. MANDATORY, so that a message to an unknown peer or a full queue is reported (see `Sent`) instead of
    dropped. With a pair, the public key of the sender comes before the routing id. Arguments and errors are those of
    `bus_publisher`.
    """
    sock = context.socket(zmq.ROUTER)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.ROUTER_HANDOVER, 0)
    sock.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    return _bind(AsyncZmqSocket, sock, address, CONTROL_QUEUED_MAX, insecure, pair)


def agent_subscriber(
    context: Context, address: str, topics: Sequence[bytes], keys: Credentials | None = None
) -> AsyncZmqSocket:
    """Dial the publisher. The topics are set before it connects, so the first message is the welcome.

    The bus may start later: the socket keeps dialling. Raises BusAddressError if this is not an address.
    """
    sock = context.socket(zmq.SUB)
    for topic in topics:
        sock.set(zmq.SUBSCRIBE, topic)
    with _dialling(sock, address, EVENTS_QUEUED_MAX):
        if keys is not None:
            use_keys(sock, keys)
        sock.connect(address)
        return AsyncZmqSocket(sock, address)


def agent_dealer(
    context: Context,
    address: str,
    keys: Credentials | None = None,
    *,
    watched: bool = True,
    wait_for_listener: bool = True,
    probe: bool = False,
) -> DialledSocket:
    """Dial the router. IMMEDIATE, so nothing is queued for a bus that is not there: `send` waits for a connection.

    With `probe`, each connection begins with an empty message, those that libzmq dials by itself too. So the bus sees
    at once that its peer has a new one. `watched` and `wait_for_listener` are as for `DialledSocket`. Raises
    BusAddressError if `address` is not an address.
    """
    sock = context.socket(zmq.DEALER)
    sock.set(zmq.PROBE_ROUTER, probe)
    sock.set(zmq.IMMEDIATE, 1)
    with _dialling(sock, address, CONTROL_QUEUED_MAX):
        return DialledSocket(sock, address, keys, watched=watched, wait_for_listener=wait_for_listener)


def _bind(
    kind: type[S], sock: zmq.Socket[bytes], address: str, queued_max: int, insecure: bool, pair: KeyPair | None
) -> S:
    # The default of 100 overflows when a fleet of thousands joins at once.
    sock.set(zmq.BACKLOG, 4096)
    with _closing_on_error(sock, address, "bind"):
        _set_common(sock, address, queued_max)
        if pair is not None:
            # Only peers with a key that the ZAP handler knows come in; without a handler, none.
            sock.set(zmq.CURVE_SERVER, 1)
            sock.set(zmq.CURVE_SECRETKEY, pair.secret.encode())
            sock.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        elif not insecure and not is_local(address):
            raise BusAddressError(
                f"refused to bind {address!r}: other machines can reach it, and without keys any program on them could "
                "command the engines. Make keys (`rolloutctl keys new NAME`) and pass keys=…, bind tcp://127.0.0.1, or "
                "pass insecure=True on a network that you trust"
            )
        if address.startswith("ipc://"):
            _require_unused(address)
        sock.bind(address)
        endpoint = sock.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return kind(sock, endpoint, with_key=pair is not None, listens=not address.startswith("inproc://"))


@contextlib.contextmanager
def _dialling(sock: zmq.Socket[bytes], address: str, queued_max: int) -> Iterator[None]:
    sock.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    # libzmq adds jitter, so that a fleet does not reconnect all at once.
    sock.set(zmq.RECONNECT_IVL, REDIAL_MS)
    sock.set(zmq.RECONNECT_IVL_MAX, REDIAL_MS_MAX)
    sock.set(zmq.CONNECT_TIMEOUT, HANDSHAKE_MS)  # the kernel alone would wait for two minutes
    with _closing_on_error(sock, address, "dial"):
        _set_common(sock, address, queued_max)
        yield


@contextlib.contextmanager
def _closing_on_error(sock: zmq.Socket[bytes], address: str, verb: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        sock.close(0)
        if not isinstance(error, zmq.ZMQError):
            raise
        if error.errno == zmq.EADDRINUSE:
            raise _in_use(address) from error
        raise BusAddressError(f"can't {verb} {address!r}: {zmq.strerror(error.errno or 0)}. {_EXAMPLES}") from error


def _set_common(sock: zmq.Socket[bytes], address: str, queued_max: int) -> None:
    port = address.rpartition(":")[2]
    if address.startswith("tcp://") and port.isdecimal() and int(port) > 65535:
        # libzmq would take it modulo 65536 and use another port.
        raise BusAddressError(f"can't use {address!r}: the largest port is 65535. {_EXAMPLES}")
    sock.set(zmq.SNDHWM, queued_max)
    sock.set(zmq.RCVHWM, 0)  # rule 1
    sock.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.set(zmq.LINGER, LINGER_MS)
    sock.set(zmq.TCP_MAXRT, DEAD_HOST_MS)  # while something is unacknowledged, and keepalive while nothing is
    sock.set(zmq.TCP_KEEPALIVE, 1)
    sock.set(zmq.TCP_KEEPALIVE_IDLE, 5)
    sock.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    sock.set(zmq.TCP_KEEPALIVE_CNT, 2)
    if address.startswith("tcp://["):
        sock.set(zmq.IPV6, 1)


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address. Raises BusAddressError if it is none that can be bound."""
    transport, _, place = address.partition("://")
    if transport in ("ipc", "inproc") and place:
        return True
    if transport != "tcp" or ":" not in place:
        raise BusAddressError(f"can't bind {address!r}: not an address. {_EXAMPLES}")
    return stays_here(address)


def stays_here(address: str) -> bool:
    """Whether an address is of this machine alone. Host names other than localhost count as remote."""
    transport, _, place = address.partition("://")
    if transport != "tcp":
        return True
    host = place.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):  # `*`, or a name that may stand for any address
        return ipaddress.ip_address(host).is_loopback
    return False


def _require_unused(address: str) -> None:
    """Raise AddressInUse if a socket listens on an ipc path: libzmq would silently take it away from them."""
    path = address.removeprefix("ipc://")
    if path in ("", "*") or path.startswith("@"):
        return
    # OSError: not a possible path. `bind` has the better message.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) in (0, errno.EAGAIN):  # EAGAIN: it listens, with a full backlog
            raise _in_use(address)


def _in_use(address: str) -> AddressInUse:
    holder = _holder(address) or "perhaps by a run that has not ended"
    return AddressInUse(f"{address} is in use, {holder}: end that run, or bind another address")


def _holder(address: str) -> str:
    """Who listens at the port of an address, if this process may know that."""
    import psutil

    port = address.rpartition(":")[2]
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp") if port.isdecimal() else ():
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (int(port),)
            if listens and connection.pid is not None:
                return f"by process {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:200]})"
    return ""
