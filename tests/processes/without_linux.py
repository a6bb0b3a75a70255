"""Imports everything and runs a command in a Python that says it is on macOS, and lacks what only Linux has."""

import asyncio  # noqa: F401, first, as all packages that were built for Linux
import fcntl
import importlib
import os
import pkgutil
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

import psutil  # noqa: F401
import torch  # noqa: F401
import trio  # noqa: F401, which httpcore imports
import zmq  # noqa: F401

LINUX_ONLY = {
    os: ("eventfd", "pidfd_open", "pipe2", "fdatasync", "sched_", "posix_fadvise", "posix_fallocate", "memfd_create",
         "copy_file_range", "splice", "getrandom", "EFD_", "O_TMPFILE", "O_DIRECT", "MFD_", "setns", "unshare"),
    select: ("epoll", "EPOLL"),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGPOLL", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT"),
    socket: ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "SOCK_NONBLOCK", "SOCK_CLOEXEC", "SO_PEERCRED"),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_NOTIFY"),
}  # fmt: skip
"""Names, or how they begin, that macOS lacks."""


def remove() -> None:
    for module, beginnings in LINUX_ONLY.items():
        for name in dir(module):
            if name.startswith(beginnings):
                delattr(module, name)
        vars(module).get("__all__", [])[:] = [name for name in getattr(module, "__all__", ()) if hasattr(module, name)]


def import_all() -> int:
    """Import every module that is not for a trainer or an engine that is not installed; return how many."""
    count = 0
    for package in ("schemas", "controlplane", "workers"):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in ("schemas", "controlplane", "workers"):
                    raise
            count += 1
    return count


def run_a_command() -> None:
    import anyio

    from controlplane import ControlPlane
    from schemas.identity import Identity
    from tests.unit.small_bus import FLUSH, Engine
    from workers.agent import Agent

    async def run_agent(bus: str, folder: Path) -> None:
        async with Agent(
            bus=bus, identity=Identity(replica=0, node_rank=0, nnodes=1), engine=Engine(), state_dir=folder
        ) as agent:
            await agent.run()

    with tempfile.TemporaryDirectory() as folder:
        with ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db") as plane:
            threading.Thread(target=anyio.run, args=(run_agent, plane.address, Path(folder)), daemon=True).start()
            plane.wait_for_agents(1, timeout=60).wait()
            report = plane.publish(FLUSH).wait()
        print(report.headline)  # noqa: T201


def launch_a_server() -> None:
    from schemas.errors import ConfigError
    from workers.server.launch import ServerProcess

    try:
        ServerProcess(["true"], log=Path("server.log")).start()
    except ConfigError as error:
        print(error)  # noqa: T201


if __name__ == "__main__":
    remove()
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc, assignment]
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # it was built for Linux
    sys.platform = "darwin"
    print(import_all(), "modules")  # noqa: T201
    run_a_command()
    launch_a_server()
