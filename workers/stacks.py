"""Dumps of the Python stacks of an engine that does not answer, taken by py-spy, which reads them from outside.

The agent takes one shortly before the deadline of the engine's call. What became of it is a sentence in the outcome.
py-spy shows functions, files and lines, and no values of variables.

Rule 1  Nothing here makes the agent wait or fail: a dump runs beside everything else, with a limit of time, and
        whatever goes wrong is the sentence.
Rule 2  The agent asks about its own process and those below it: a server that it launched, and all that the server has
        started, or the workers of an engine in its own process. It never looks for processes of others.
"""

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
from schemas.storage.atomic_write import private
from schemas.transport import background
from schemas.transport.keys import environment_of_children

BEFORE_MS: Final = 3000
"""Longest time before the deadline at which a dump begins; a shorter call leaves a quarter of its time."""
DUMP_S: Final = 10.0
"""Longest time for all processes together. What is not there by then is left out."""
AT_ONCE: Final = 4
"""Processes that are read at the same time."""
NOTE_MAX: Final = 4000
"""Most characters of the sentence: an outcome has room for twice as many."""

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
        except Exception as error:  # of psutil, or of the file
            logger.debug("a dump of stacks failed", exc_info=True)
            note = f"Its stacks could not be dumped: {type(error).__name__}: {error}"
        return note[:NOTE_MAX].encode(errors="replace").decode()  # a path may be none of UTF-8

    def _dump(self, folder: Path, agent: str, call: str) -> str:
        import psutil  # half a megabyte, for an agent that takes dumps

        me, until_s = psutil.Process(), time.monotonic() + DUMP_S
        processes = [me, *([] if self._foreign else me.children(recursive=True))]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            reads = list(threads.map(lambda process: self._read(process.pid, until_s), processes))
        stacks, reasons = [text for text, reason in reads if not reason], [reason for _, reason in reads if reason]
        if not stacks:
            return f"Its stacks could not be dumped: {reasons[0]}."
        path = folder.absolute() / f"stacks-{agent}-{time.strftime('%Y%m%dT%H%M%S')}.{time.time_ns() % 10**9:09}.txt"
        with open(path, "x", encoding="utf-8", opener=private) as file:
            file.write("\n\n".join((f"agent {agent}: {call} has not returned", *stacks)))
        if self._foreign:
            return f"The agent's own stacks are in {path}, the server's are not: this agent did not launch it."
        whose = "the agent's process" if len(stacks) == 1 else f"{len(stacks)} processes, the agent's own among them,"
        others = f"; {len(reasons)} could not be read: {reasons[0]}" if reasons else ""
        return f"The stacks of {whose} are in {path}{others}."

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
        text = done.stdout.decode(errors="replace").strip()
        return text, (text.partition("\n")[0] or "py-spy printed nothing").rstrip(".") if done.returncode != 0 else ""


def _find_py_spy() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    program = str(beside) if beside.is_file() else shutil.which("py-spy")
    if program is None:
        raise ExtraMissing("dumps of stacks (--dump-stacks) need py-spy, which is not installed", "stacks")
    return program
