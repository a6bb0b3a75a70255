"""Two machines: network namespaces with a cable between them. Each has a name, a home and an address.

Their processes see the files of this machine, and both names in /etc/hosts. Between the homes, `scp` copies.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import pytest

from tests.running import environment

ADDRESSES: Final = {"trainer": "10.77.0.1", "node-a": "10.77.0.2"}
OF_TRAINER: Final = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--uts")
OF_NODE: Final = ("unshare", "--net", "--uts")
BOOT: Final = 'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && echo up && exec cat'
SCP: Final = '#!/bin/sh\ncp "$1" "$2" "$HOME/../${3%%:*}/${3#*:}"\n'


@dataclass(frozen=True)
class Machine:
    """One of the machines. `pid` is a process that lives as long as it does."""

    pid: int
    home: Path

    def command(self, *words: object) -> list[str]:
        """A command line, as this machine runs it in its home."""
        enter = ("nsenter", f"--target={self.pid}", "--user", "--preserve-credentials", "--net", "--mount", "--uts")
        return [*enter, "env", f"--chdir={self.home}", *map(str, words)]

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.home.parent / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
        inherited = {name: value for name, value in environment().items() if not name.startswith("XDG_")}
        return {**inherited, "HOME": str(self.home), "PATH": path, "COLUMNS": "200"}

    def type(self, block: str) -> subprocess.CompletedProcess[str]:
        """Run a block in a shell, to its end."""
        words = self.command("bash", "-ec", block)
        return subprocess.run(words, env=self.environment(), capture_output=True, text=True, timeout=100)

    @contextmanager
    def typed(self, block: str, errors: IO[str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """Start a block of one command, and kill it when the block ends."""
        pipe = subprocess.PIPE
        words = self.command("bash", "-c", block)
        with subprocess.Popen(
            words, env=self.environment(), stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as shell:
            try:
                yield shell
            finally:
                shell.kill()


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """`trainer` and `node-a`. Skips the test, with the reason, where no namespace may be made."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no network namespaces without {', '.join(missing)} (Debian: util-linux, iproute2)")
    hosts = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    (folder / "bin").mkdir()
    (folder / "bin/scp").write_text(SCP)
    (folder / "bin/scp").chmod(0o700)
    with ExitStack() as stack:
        trainer = Machine(stack.enter_context(_booted(OF_TRAINER, "trainer", folder)), folder / "trainer")
        node = Machine(stack.enter_context(_booted(trainer.command(*OF_NODE), "node-a", folder)), folder / "node-a")
        plug = f"ip link add eth0 type veth peer name eth0 netns {node.pid}"
        for machine, block in ((trainer, plug), (trainer, _address("trainer")), (node, _address("node-a"))):
            done = machine.type(block)
            if done.returncode:
                pytest.skip(f"this machine connects no network namespaces: {block}: {done.stderr}")
        yield trainer, node


@contextmanager
def _booted(new: tuple[str, ...] | list[str], name: str, folder: Path) -> Iterator[int]:
    (folder / name).mkdir()
    pipe = subprocess.PIPE
    words = [*new, "sh", "-c", BOOT, "sh", folder / "hosts", name]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as machine:
        try:
            assert machine.stdout is not None and machine.stderr is not None
            if machine.stdout.readline() != "up\n":
                pytest.skip(f"this machine makes no network namespaces: {machine.stderr.read()}")
            yield machine.pid
        finally:
            machine.kill()


def _address(name: str) -> str:
    return f"ip addr add {ADDRESSES[name]}/24 dev eth0 && ip link set eth0 up"
