"""A small real fleet for tests: agents with tiny engines, as processes that are started again when they die.

The pytest fixture `fleet` gives one to a test. It needs the extra `torch`.
"""

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, Self

from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.report.verdict import verdict
from schemas.errors import CommandFailed
from schemas.fault_plan import FaultPlan, parse_plan

RESTART_S: Final = 0.5
"""From the end of an agent to its next start."""


class StagingFleet:
    """Agents for a trainer that embeds its bus at `bus`. Use as a context.

    Args:
        folder: For the agents' state, their logs and the plan.
        replicas: Number of replicas, of one node each.
        faults: The plan of a game day, as the text of a TOML file; empty for none.
        checkpoints: Root of the paths in weight syncs.

    Attributes:
        bus: Address for the trainer's bus.
        plan: What goes wrong.

    Raises:
        ConfigError: The plan is wrong.
    """

    def __init__(self, folder: Path, replicas: int = 2, faults: str = "", checkpoints: Path = Path()) -> None:
        self._folder, self._replicas, self._checkpoints = folder, replicas, checkpoints.absolute()
        self._file = folder / "faults.toml"
        self.plan: FaultPlan = parse_plan(faults)
        self._file.write_text(faults, "utf-8")
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.bus = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._leaving = threading.Event()
        self._keepers = [threading.Thread(target=self._keep, args=[replica]) for replica in range(replicas)]
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for keeper in self._keepers:
            keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for agent in tuple(self._agents.values()):
            agent.kill()  # some may be stopped
        for keeper in self._keepers:
            keeper.join()

    def judge(self, log: Path) -> str:
        """Return the verdict on a run of this fleet.

        Raises:
            CommandFailed: A promise broke, or the fleet was not whole at the end. The text is the verdict.
        """
        lines, good = verdict(self.plan, collect(RunLog.walk(log)))
        text = "\n".join(lines)
        if not good:
            raise CommandFailed(text)
        return text

    def _keep(self, replica: int) -> None:
        words = ["agent", "--bus", self.bus, "--replica", str(replica), "--engine", "tiny"]
        words += ["--state-dir", str(self._folder), "--traces", str(self._folder / "traces")]
        words += ["--checkpoints", str(self._checkpoints), "--faults", str(self._file)]
        with (self._folder / f"agent-{replica}.log").open("ab") as log:
            while not self._leaving.is_set():
                agent = subprocess.Popen([sys.executable, "-m", "controlplane.cli", *words], stdout=log, stderr=log)
                self._agents[replica] = agent
                if self._leaving.is_set():
                    agent.kill()
                agent.wait()
                self._leaving.wait(RESTART_S)
