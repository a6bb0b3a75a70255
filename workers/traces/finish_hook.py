"""The user's own command, run on a node after the last profiled step, for example to upload traces.

It comes from the agent's own configuration, never over the bus. It runs in a session of its own, so it survives the
agent. Training does not wait for it: after some seconds the outcome says that it is still running.
"""

import logging
import os
import subprocess
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from anyio import to_thread

from schemas.errors import EngineError
from schemas.identity import Identity
from schemas.logs import logger_of
from schemas.transport import background
from schemas.transport.keys import environment_of_children

logger = logger_of("agent")

WAIT_S: Final = 10.0
"""How long the outcome of the command waits for the hook."""
QUOTED_BYTES: Final = 1000
"""Bytes of a failing hook's output that the error quotes."""
NSIGHT_DIR: Final = "/tmp/ray/session_latest/logs/nsight"
"""Where Ray has nsys write (verl 0.9.1, utils/profiler/nvtx_profile.py)."""


class FinishHook:
    """Runs the command, with its output in a log below the traces root."""

    def __init__(self, command: str, identity: Identity, root: Path) -> None:
        self._command, self._identity, self._root = command, identity, root
        self._log = root / f".finish_hook-{identity.agent}.log"

    async def run(self, tool: str, steps: tuple[int, ...]) -> bool:
        """Run the command and wait up to `WAIT_S`. Returns whether it is still running. Raises EngineError."""
        ended = await to_thread.run_sync(self.begin, tool, steps)
        if not await background.done_within(ended, WAIT_S):
            logger.info("agent %s: the finish hook is still running; its output: %s", self._identity.agent, self._log)
            return True
        if code := ended.result():
            output = await to_thread.run_sync(self._last_output)
            raise EngineError(
                f"the finish hook ended with exit code {code}: {output or 'it printed nothing'}. The traces are still "
                f"in {self._root}."
            )
        return False

    def begin(self, tool: str, steps: tuple[int, ...]) -> "Future[int]":
        """Start the command. Returns its exit code later, and logs it. Raises EngineError if it can't be started."""
        if not self._command:
            raise EngineError(
                "the finish hook was not run: this agent was started without one. Give it the same profiler "
                "configuration as the trainer, or its command (--finish-hook). The traces are where they were written."
            )
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with open(self._log, "wb") as output:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**environment_of_children(), **self._variables(tool, steps)},
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"the finish hook was not started: {error.strerror}: {error.filename}.") from error
        return background.begin(partial(self._await_end, process), "finish-hook", daemon=True)

    def _await_end(self, process: "subprocess.Popen[bytes]") -> int:
        code = process.wait()
        level = logging.INFO if code == 0 else logging.WARNING
        logger.log(
            level, "agent %s: the finish hook ended with exit code %d: %s", self._identity.agent, code, self._log
        )
        return code

    def _last_output(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - QUOTED_BYTES))
                return log.read(QUOTED_BYTES).decode(errors="replace").strip()
        except OSError:  # the hook may have removed the whole directory
            return ""

    def _variables(self, tool: str, steps: tuple[int, ...]) -> dict[str, str]:
        """Return verl's environment variables for the hook, and ours."""
        identity, ranks, root = self._identity, self._identity.ranks_on_node, str(self._root)
        variables = {
            "VERL_PROFILE_SAVE_PATH": root,
            "VERL_PROFILE_TOOL": tool,
            "VERL_PROFILE_RANK": str(ranks.start),
            "VERL_PROFILE_PID": str(os.getpid()),
            "VERL_PROFILE_ROLE": identity.role,
            "ROLLOUTCTL_PROFILE_ROOT": root,
            "ROLLOUTCTL_PROFILE_TOOL": tool,
            "ROLLOUTCTL_PROFILE_ROLE": identity.role,
            "ROLLOUTCTL_PROFILE_AGENT": identity.agent,
            "ROLLOUTCTL_PROFILE_RANKS": ",".join(map(str, ranks)),
            "ROLLOUTCTL_PROFILE_STEPS": ",".join(map(str, steps)),
        }
        return variables | ({"VERL_PROFILE_RAY_NSIGHT_DIR": NSIGHT_DIR} if tool == "nsys" else {})
