"""The user's own command, run on a node after the last profiled step: to upload traces, say.

It comes from the agent's own configuration, never over the bus. It runs in a session of its own, so it goes on when the
agent ends, and training never waits for it: one that takes longer than some seconds is told as still running.
"""

import logging
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

import anyio
from anyio import to_thread

from schemas.carriers.wakeup import Wakeup
from schemas.errors import EngineError
from schemas.identity import Identity

logger = logging.getLogger("rolloutctl.agent")

PATIENCE_S: Final = 10.0
"""How long the outcome of the command waits for the hook's."""
TOLD: Final = 1000
"""Letters of what a failing hook said that are told."""
NSIGHT_DIR: Final = "/tmp/ray/session_latest/logs/nsight"
"""Where Ray has nsys write (verl 0.9.1, utils/profiler/nvtx_profile.py)."""


class FinishHook:
    """command: for `/bin/sh -c`.   root: of the traces."""

    def __init__(self, command: str, identity: Identity, root: Path) -> None:
        self._command, self._identity, self._root = command, identity, root

    async def run(self, tool: str, steps: tuple[int, ...]) -> bool:
        """Run it; return whether it still runs. Raises EngineError when it failed or can't be started."""
        wakeup, log = Wakeup(), self._log
        try:
            process = await to_thread.run_sync(self.begin, tool, steps, wakeup)
        except EngineError:
            wakeup.close()
            raise
        try:
            with anyio.move_on_after(PATIENCE_S):
                await wakeup.wait()
        finally:
            wakeup.close()
        if process.returncode is None:
            logger.info("agent %s: the finish hook goes on; what it says is in %s", self._identity.agent, log)
            return True
        if process.returncode != 0:
            said = ""
            with suppress(OSError):  # it may have taken the whole directory away
                said = (await to_thread.run_sync(log.read_bytes))[-TOLD:].decode(errors="replace").strip()
            raise EngineError(
                f"the finish hook ended with exit code {process.returncode}: {said or 'it said nothing'}. The traces "
                f"are still in {self._root}."
            )
        return False

    def begin(self, tool: str, steps: tuple[int, ...], wakeup: Wakeup | None = None) -> "subprocess.Popen[bytes]":
        """Start it; its end rings the wakeup, and is logged. Raises EngineError when it can't be started."""
        try:
            process = self._start(self._log, {**os.environ, **self._told(tool, steps)})
        except OSError as error:
            raise EngineError(f"the finish hook was not started: {error.strerror}: {error.filename}.") from error
        Thread(target=self._await_end, args=(process, wakeup, self._log), name="finish-hook", daemon=True).start()
        return process

    @property
    def _log(self) -> Path:
        return self._root / f".finish_hook-{self._identity.agent}.log"

    def _await_end(self, process: "subprocess.Popen[bytes]", wakeup: Wakeup | None, log: Path) -> None:
        code = process.wait()
        if wakeup is not None:
            wakeup.notify()
        level = logging.INFO if code == 0 else logging.WARNING
        logger.log(level, "agent %s: the finish hook ended with exit code %d: %s", self._identity.agent, code, log)

    def _start(self, log: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        self._root.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            return subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _told(self, tool: str, steps: tuple[int, ...]) -> dict[str, str]:
        """What the hook finds in its environment: verl's names, and ours."""
        identity, ranks = self._identity, self._identity.ranks_on_node
        verl = {
            "VERL_PROFILE_SAVE_PATH": str(self._root),
            "VERL_PROFILE_TOOL": tool,
            "VERL_PROFILE_RANK": str(ranks.start),
            "VERL_PROFILE_PID": str(os.getpid()),
            "VERL_PROFILE_ROLE": identity.role,
        }
        if tool == "nsys":
            verl["VERL_PROFILE_RAY_NSIGHT_DIR"] = NSIGHT_DIR
        ours = {
            "ROOT": str(self._root),
            "TOOL": tool,
            "ROLE": identity.role,
            "AGENT": identity.agent,
            "RANKS": ",".join(map(str, ranks)),
            "STEPS": ",".join(map(str, steps)),
        }
        return {**verl, **{f"ROLLOUTCTL_PROFILE_{name}": value for name, value in ours.items()}}
