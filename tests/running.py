"""Our commands and small programs, run as processes of their own."""

import logging
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest.mock import patch

from click.testing import CliRunner

from schemas import logs

ROOT = Path(__file__).parents[1]
OURS = re.compile(r"ROLLOUTCTL_(?!TEST_)")
_OTHER_PLUGINS = ("cacheprovider", "hypothesispytest", "xdist", "xdist.looponfail", "pytest_cov", "anyio")
PYTEST = ("-m", "pytest", *(word for name in _OTHER_PLUGINS for word in ("-p", f"no:{name}")))
"""A pytest without the plugins that take most of a second to load."""


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process with this checkout on the path, and none of our settings but `changes`.

    `ray.init()` would join a cluster that tests of another process have made, and go down with it.
    """
    inherited = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    return {**inherited, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", **(changes or {})}


def python(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 100,
    max_file_bytes: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python with these arguments to its end, and return its exit code and output.

    Args:
        words: Arguments of the interpreter, such as `"-c", code`.
        cwd: Working directory.
        env: Environment variables to set beside the inherited ones.
        timeout_s: The test fails when the process takes longer.
        max_file_bytes: Largest file that the process may write, to stand for a full disk.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes or 0, max_file_bytes or 0))

    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        preexec_fn=None if max_file_bytes is None else limit,
    )


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Make every write of this process past the limit fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rolloutctl(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, max_file_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, with a terminal wide enough for every table."""
    wide = {"COLUMNS": "200", **(env or {})}
    return python("-m", "controlplane.cli", *words, cwd=cwd, env=wide, max_file_bytes=max_file_bytes)


def typed(*words: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The same in this process, which takes a fraction of the time. Only for commands that leave nothing behind.

    What other threads log is not the command's: a bus and agents may live in the test's process.
    """
    from controlplane.cli.__main__ import run

    root, ours = logging.getLogger(), logging.getLogger("rolloutctl")
    handlers, level, our_level, here = root.handlers[:], root.level, ours.level, threading.get_ident()
    emit = logs._Stderr.emit

    def emit_here(handler: logs._Stderr, record: logging.LogRecord) -> None:
        if record.thread == here:
            emit(handler, record)

    try:
        with (
            patch.object(logs._Stderr, "emit", emit_here),
            CliRunner().isolation(env={"COLUMNS": "200", **(env or {})}) as (out, err, _),
        ):
            code = run([*map(str, words)])
            return subprocess.CompletedProcess(str(words), code, out.getvalue().decode(), err.getvalue().decode())
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        ours.setLevel(our_level)


@contextmanager
def started(
    *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, stderr: IO[bytes] | int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a Python with these arguments, with pipes to its input and output; kill it when the block ends."""
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        bufsize=1,
    )
    with process:  # closes the pipes and waits
        try:
            yield process
        finally:
            process.kill()
