"""Addresses of sockets: loopback unless `insecure`, and every refusal says what to do."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import AddressInUse, BusAddressError
from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.sockets import Context, agent_dealer, bus_publisher, bus_router

ANY_PORT = "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://localhost:0", "tcp://[::1]:0", "inproc://a", "ipc"]
)
def test_a_local_address_binds_and_is_reported_with_its_port(context: Context, tmp_path: Path, address: str) -> None:
    if address == "ipc":
        address = f"ipc://{tmp_path}/bus"
    router = bus_router(context, address)
    assert not router.address.endswith((":0", "*", "\0"))
    dealer = agent_dealer(context, router.address)
    dealer.close(0)
    router.close(0)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://192.0.2.1:5000", "tcp://lo:0"]
)
@pytest.mark.parametrize("constructor", [bus_publisher, bus_router])
def test_an_address_that_other_machines_reach_is_refused_with_advice(
    context: Context, constructor: Callable[[Context, str], AsyncZmqSocket], address: str
) -> None:
    with pytest.raises(BusAddressError, match="other machines can reach it.*insecure=True"):
        constructor(context, address)


def test_insecure_binds_everywhere(context: Context) -> None:
    router = bus_router(context, "tcp://0.0.0.0:0", insecure=True)
    assert router.address.startswith("tcp://0.0.0.0:")
    router.close(0)


@pytest.mark.parametrize(
    "address", ["", "5555", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:http", "ipc://",
                "quic://127.0.0.1:1", "ipc:///nonexistent/folder/bus", "ipc:///" + "x" * 200]
)  # fmt: skip
def test_a_text_that_is_not_an_address_cannot_be_bound(context: Context, address: str) -> None:
    with pytest.raises(BusAddressError, match="can't (bind|use).*An address looks like") as caught:
        bus_router(context, address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("address", ["", "5555", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "quic://127.0.0.1:1"])
def test_a_text_that_is_not_an_address_cannot_be_dialled(context: Context, address: str) -> None:
    with pytest.raises(BusAddressError, match="can't (dial|use)"):
        agent_dealer(context, address)


def test_an_address_in_use_is_named(context: Context, tmp_path: Path) -> None:
    for address in (ANY_PORT, f"ipc://{tmp_path}/bus"):
        first = bus_router(context, address)
        with pytest.raises(AddressInUse) as caught:
            bus_publisher(context, first.address)
        assert first.address in str(caught.value)
        first.close(0)


def test_an_ipc_path_left_by_a_dead_process_is_taken_over(context: Context, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "bus"))
    bus_router(context, f"ipc://{tmp_path}/bus").close(0)
