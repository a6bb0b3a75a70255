"""Dumps of the Python stacks of an engine that does not answer, taken by py-spy, which reads them from outside.

The agent takes one shortly before the deadline of the engine's call. What became of it is a sentence in the outcome.
py-spy shows functions, files and lines, and no values of variables.

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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from schemas.errors import ExtraMissing
from schemas.logs import logger_of
from schemas.transport import background
from schemas.transport.keys import environment_of_children

BEFORE_MS: Final = 3000
"""Longest time before the deadline at which a dump begins; a shorter call leaves a quarter of its time."""
DUMP_S: Final = 10.0
"""Longest time for all processes together. What is not there by then is left out."""
AT_ONCE: Final = 4
"""Processes that are read at the same time."""
PROCESSES_MAX: Final = 128
PROCESS_CHARACTERS: Final = 256 * 1024
FILE_BYTES: Final = 4 * 1024 * 1024
KEPT: Final = 5
"""Newest files that are kept, for each agent."""
NOTE_MAX: Final = 4000
"""Most characters of the sentence: an outcome has room for twice as many."""
_REASON_MAX: Final = 200

logger = logger_of("agent")


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
        work = background.begin(partial(self._dump, folder, agent, call), "rolloutctl-stacks", daemon=True)
        await background.done_within(work)
        try:
            note = work.result()
        except Exception as error:  # of psutil
            logger.debug("a dump of stacks failed", exc_info=True)
            note = f"Its stacks could not be dumped: {type(error).__name__}: {error}"
        return note[:NOTE_MAX].encode(errors="replace").decode()  # a path may be none of UTF-8

    def _dump(self, folder: Path, agent: str, call: str) -> str:
        import psutil  # half a megabyte, for an agent that takes dumps

        me, until_s = psutil.Process(), time.monotonic() + DUMP_S
        processes = [me, *([] if self._foreign else me.children(recursive=True))][:PROCESSES_MAX]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            reads = list(threads.map(lambda process: (process.pid, *self._read(process.pid, until_s)), processes))
        reasons = [reason for _, _, reason in reads if reason]
        if len(reasons) == len(reads):
            return f"Its stacks could not be dumped: {reasons[0]}."
        try:
            path = _write(folder, agent, _text(agent, call, reads))
        except OSError as error:
            return f"Its stacks could not be written to {folder}: {error.strerror}."
        return self._sentence(path, len(reads) - len(reasons), reasons)

    def _read(self, pid: int, until_s: float) -> tuple[str, str]:
        """Return what py-spy prints about one process, or the reason why it fails."""
        words = [self._program, "dump", "--full-filenames", "--pid", str(pid)]
        left_s = max(0.0, until_s - time.monotonic())
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=left_s,
                env=environment_of_children(),
            )
        except OSError as error:
            return "", f"{self._program} can't be run ({error.strerror})"
        except subprocess.TimeoutExpired:
            return "", f"not done within {DUMP_S:g} s"
        text = done.stdout.decode(errors="replace")
        if done.returncode != 0:
            return "", _reason(text)
        frames = "".join(line for line in text.splitlines(True) if not line.startswith("Process "))
        return frames[:PROCESS_CHARACTERS], ""

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
        raise ExtraMissing("dumps of stacks (--dump-stacks) need py-spy, which is not installed", "stacks")
    return program


def _reason(output: str) -> str:
    """Return why py-spy failed, in a clause."""
    if "permission denied" in output.lower():
        return "py-spy is not permitted to read the process (it needs root or CAP_SYS_PTRACE here)"
    said = output[max(0, output.find("Error: ")) :].strip()  # which process it is comes first, if that is found
    return (said.partition("\n")[0] or "py-spy printed nothing").rstrip(".")[:_REASON_MAX]


def _text(agent: str, call: str, reads: list[tuple[int, str, str]]) -> str:
    parts = [f"agent {agent}: {call} has not returned by {time.strftime('%Y-%m-%d %H:%M:%S%z')}\n"]
    for pid, stacks, reason in reads:
        whose = "the agent" if pid == os.getpid() else "below the agent"
        parts.append(f"\n--- process {pid}, {whose} ---\n{stacks.strip() or reason}\n")
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
