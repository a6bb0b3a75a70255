"""Dumps of the Python stacks of an engine that does not answer, taken by py-spy, which reads them from outside.

The agent takes one when the machine asks for it (`DumpStacks`), shortly before the deadline of the engine's call. What
became of it is a sentence in the outcome. py-spy shows functions, files and lines, and no values of variables.

Rule 1  Nothing here makes the agent wait or fail: a dump runs beside everything else, with a limit of time and size,
        and whatever goes wrong is the sentence.
Rule 2  The agent asks about its own process and those below it: a server that it launched, and all that the server has
        started, or the workers of an engine in its own process. It never looks for processes of others.
"""

import os
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
from anyio import CapacityLimiter, to_thread

from schemas.carriers.keys import environment_of_children
from schemas.errors import ConfigError
from schemas.logs import logger_of

if TYPE_CHECKING:
    import psutil

DUMP_S: Final = 10.0
"""Longest time for all processes together. What is not there by then is left out."""
AT_ONCE: Final = 4
"""Processes that are read at the same time."""
PROCESSES_MAX: Final = 128
PROCESS_BYTES: Final = 256 * 1024
FILE_BYTES: Final = 4 * 1024 * 1024
KEPT: Final = 5
"""Newest files that are kept, for each agent."""
NOTE_MAX: Final = 4000
"""Most characters of the sentence: an outcome has room for twice as many."""
_REASON_MAX: Final = 200

logger = logger_of("agent")


class _Read(NamedTuple):
    """What py-spy printed about one process; if it failed, the reason."""

    stacks: str = ""
    reason: str = ""


class StackDumps:
    """Takes the dumps of one agent.

    Args:
        foreign_server: The engine is a server that this agent did not launch, so only the agent's own process is read.

    Raises:
        ConfigError: py-spy is not installed.
    """

    def __init__(self, *, foreign_server: bool = False) -> None:
        self._foreign = foreign_server
        self._program = _find_py_spy()

    async def dump(self, folder: Path, agent: str, call: str) -> str:
        """Read the processes and write their stacks to a new file. Returns a sentence for the outcome.

        Args:
            folder: Where the file is written.
            agent: Begins the name of the file.
            call: The call that does not return.
        """
        try:
            note = await self._dump(folder, agent, call)
        except Exception as error:  # of psutil, of the loop's way to start programs
            logger.debug("a dump of stacks failed", exc_info=True)
            note = f"Its stacks could not be dumped: {type(error).__name__}: {error}"
        return note[:NOTE_MAX].encode(errors="replace").decode()  # a path may be none of UTF-8

    async def _dump(self, folder: Path, agent: str, call: str) -> str:
        processes = await to_thread.run_sync(self._processes)
        found: dict[int, _Read] = {}
        limiter = CapacityLimiter(AT_ONCE)

        async def read(pid: int) -> None:
            async with limiter:
                found[pid] = await self._read(pid)

        with anyio.move_on_after(DUMP_S):
            async with anyio.create_task_group() as tasks:
                for process in processes:
                    tasks.start_soon(read, process.pid)
        late = _Read(reason=f"not done within {DUMP_S:g} s")
        reads = [(process, found.get(process.pid, late)) for process in processes]
        reasons = [result.reason for _, result in reads if result.reason]
        if len(reasons) == len(reads):
            return f"Its stacks could not be dumped: {reasons[0]}."
        try:
            path = await to_thread.run_sync(_write, folder, agent, _text(agent, call, reads))
        except OSError as error:
            return f"Its stacks could not be written to {folder}: {error.strerror}."
        return self._sentence(path, len(reads) - len(reasons), reasons)

    def _processes(self) -> "list[psutil.Process]":
        import psutil  # half a megabyte, for an agent that takes dumps

        me = psutil.Process()
        below = [] if self._foreign else me.children(recursive=True)
        return [me, *below][:PROCESSES_MAX]

    async def _read(self, pid: int) -> _Read:
        try:
            process = await anyio.open_process(
                [self._program, "dump", "--full-filenames", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment_of_children(),
            )
        except OSError as error:
            return _Read(reason=f"{self._program} can't be run ({error.strerror})")
        output = b""
        async with process:
            assert process.stdout is not None
            async for chunk in process.stdout:
                output += chunk
                if len(output) >= PROCESS_BYTES:
                    process.kill()
                    break
        text = output[:PROCESS_BYTES].decode(errors="replace")
        if process.returncode != 0 and len(output) < PROCESS_BYTES:
            return _Read(reason=_reason(text))
        return _Read(stacks="".join(line for line in text.splitlines(True) if not line.startswith("Process ")))

    def _sentence(self, path: Path, count: int, reasons: list[str]) -> str:
        if self._foreign:
            return f"The agent's own stacks are in {path}, the server's are not: this agent did not launch it."
        whose = "the agent's process" if count == 1 else f"{count} processes, the agent's own among them,"
        others = f"; {len(reasons)} could not be read: {reasons[0]}" if reasons else ""
        return f"The stacks of {whose} are in {path}{others}."


def _find_py_spy() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    program = str(beside) if beside.is_file() else shutil.which("py-spy")
    if program is None:
        raise ConfigError(
            "dumps of stacks (--dump-stacks) need py-spy, which is not installed: pip install 'rolloutctl[stacks]'."
        )
    return program


def _reason(output: str) -> str:
    """Return why py-spy failed, in a clause."""
    if "permission denied" in output.lower():
        return "py-spy is not permitted to read the process (it needs root or CAP_SYS_PTRACE here)"
    return (output.strip().partition("\n")[0] or "py-spy printed nothing").rstrip(".")[:_REASON_MAX]


def _text(agent: str, call: str, reads: "list[tuple[psutil.Process, _Read]]") -> str:
    own = os.getpid()
    parts = [f"agent {agent}: {call} has not returned by {time.strftime('%Y-%m-%d %H:%M:%S%z')}\n"]
    for process, result in reads:
        whose = "the agent" if process.pid == own else "below the agent"
        parts.append(f"\n--- process {process.pid}, {whose} ---\n{result.stacks.strip() or result.reason}\n")
    return "".join(parts)[:FILE_BYTES]


def _write(folder: Path, agent: str, text: str) -> Path:
    """Write a new file that only this user can read, and delete the oldest. Raises OSError."""
    moment = time.time_ns()
    stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(moment // 10**9))}.{moment // 10**6 % 1000:03}Z"
    path = folder.absolute() / f"stacks-{agent}-{stamp}.txt"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    for old in sorted(folder.glob(f"stacks-{agent}-*.txt"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return path
