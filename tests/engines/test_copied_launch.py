"""SGLang servers that copy their weights from a running replica while they are launched, which their agents find.

On a GPU that goes over NCCL. Here the same code of SGLang uses gloo, see standins/sitecustomize.py.
"""

import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from controlplane import ControlPlane
from tests.engines.models import save_model, save_weights, weights
from tests.engines.reports import BUS
from tests.engines.servers import AgentProcess, command, complete, environment, free_port, wait_for
from workers.server.guard import LAUNCH_LINE

GROUP_PORTS = "--remote-instance-weight-loader-send-weights-group-ports"


class Copying:
    """A replica whose agent launches a server of some model on disk, to copy the weights of another replica."""

    def __init__(self, plane: ControlPlane, folder: Path, model: str, place: str, open_: ExitStack) -> None:
        port, self.model = free_port(), str(folder / model)
        self.url = f"http://127.0.0.1:{port}"
        server = ["env", *(f"{name}={value}" for name, value in environment("sglang").items())]
        server += command("sglang", folder / model, port, "--load-format", "remote_instance")
        server += [GROUP_PORTS, f"[{free_port()}]"]
        options = ("--engine", "sglang", "--url", self.url, "--launch", "--", *server)
        self.agent = open_.enter_context(AgentProcess(plane.address, folder, place, 1, *options))
        self._log = folder / "state" / f"server-{place}.log"

    def tokens(self) -> list[int]:
        """Greedy tokens of what it serves."""
        return complete("sglang", self.url, "hello", 8, self.model)

    def launches(self) -> list[bool]:
        """Of each launch so far: whether its weights came from another server."""
        return ["Loading weights from remote instance" in part for part in self._log.read_text().split(LAUNCH_LINE)[1:]]

    def kill_server(self) -> None:
        """The guard's child, and all that it has started."""
        for process in self.agent.family():
            with suppress(psutil.NoSuchProcess):  # such as a zombie
                if process.cmdline()[1:3] == ["-m", "sglang.launch_server"]:
                    process.send_signal(signal.SIGKILL)


@pytest.mark.engine_sglang
@pytest.mark.timeout(480)
def test_a_new_replica_copies_the_weights_of_one_that_serves_and_reads_its_checkpoint_where_none_does(
    tmp_path: Path,
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        save_model(tmp_path / name, seed)
    save_weights(tmp_path / "c", weights(3))
    with ExitStack() as open_:
        plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=BUS, checkpoints=tmp_path)
        )
        first = Copying(plane, tmp_path, "a", "0.0", open_)
        plane.wait_for_agents(1, timeout=300).wait()
        assert first.launches() == [False] and "none can be copied now" in first.agent.output
        of_a = first.tokens()
        plane.sync_weights(1, "c", content=True, timeout=60).wait().raise_for_failures()
        (tmp_path / "c").rename(tmp_path / "away")  # so nothing can read it
        second = Copying(plane, tmp_path, "b", "1.0", open_)
        plane.wait_for_agents(2, timeout=300).wait()
        assert second.launches() == [True] and "version 1 is held already: the launch copied it" in second.agent.output
        assert second.tokens() == (of_c := first.tokens()) != of_a and plane.serving() == {0: 1, 1: 1}

        (tmp_path / "away").rename(tmp_path / "c")
        second.kill_server()  # and its guard launches it again, without the agent
        wait_for("a second launch", lambda: len(second.launches()) == 2)
        plane.wait_for_agents(2, timeout=300).wait()
        assert second.launches() == [True, False] and second.tokens() == of_c
