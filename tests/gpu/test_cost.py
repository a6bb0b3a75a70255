"""What a bus in the trainer's process costs a training loop whose work is on the GPU. Printed, never asserted."""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from bench.trainer import FLUSH, bus
from controlplane import ControlPlane
from controlplane.tickets import Ticket
from schemas.reports import Report

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = "cuda"
AGENTS, ROUNDS, BLOCK_S = 256, 5, 1.0


def small_steps() -> Callable[[], object]:
    """Steps of kernels so small that launching them is the work: the worst case, since it needs the GIL."""
    return _steps(width=512, batch=512)


def large_steps() -> Callable[[], object]:
    """Steps of some milliseconds on the GPU, which are launched ahead of it."""
    return _steps(width=8192, batch=8192)


def _steps(width: int, batch: int) -> Callable[[], object]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(batch, width, device=DEVICE, dtype=layers[0].weight.dtype)

    def step() -> object:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach().item()  # as a trainer that logs it, and waits for the GPU

    return step


def steps_a_second(step: Callable[[], object], beside: Callable[[], object] = lambda: None) -> float:
    """Return how fast the loop was for a block. `beside` is called before each step."""
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < BLOCK_S:
        beside()
        step()
        count += 1
    return count / took


class Commands:
    """A command a second, to all agents."""

    def __init__(self, plane: ControlPlane) -> None:
        self.tickets: list[Ticket[Report]] = []
        self._plane, self._due = plane, 0.0

    def publish_when_due(self) -> None:
        if (now := time.perf_counter()) >= self._due:
            self.tickets.append(self._plane.publish(FLUSH))
            self._due = now + 1


@pytest.mark.parametrize("steps", [small_steps, large_steps])
def test_what_a_bus_with_its_fleet_costs_a_loop(
    steps: Callable[[], Callable[[], object]], measured: Callable[[str], None]
) -> None:
    """Blocks of all kinds in turn, so that whatever else the machine does strikes all of them."""
    step = steps()
    cores = os.sched_getaffinity(0)
    for _ in range(20):
        step()
    alone, idle, commanded = [], [], []
    for _ in range(ROUNDS):
        alone.append(steps_a_second(step))
        with ExitStack() as stack:
            plane = stack.enter_context(bus(AGENTS))
            os.sched_setaffinity(0, cores)  # the loop is not pinned to a core, as a trainer's is not
            commands = Commands(plane)
            idle.append(steps_a_second(step))
            commanded.append(steps_a_second(step, commands.publish_when_due))
            for ticket in commands.tickets:
                ticket.wait().raise_for_failures()
    base = statistics.median(alone)
    measured(
        f"a loop of {1000 / base:.2f} ms a step ({steps.__name__}) without a bus: {1000 / max(alone):.2f} to "
        f"{1000 / min(alone):.2f} ms in {ROUNDS} blocks"
    )
    for what, found in ((f"{AGENTS} idle agents", idle), (f"{AGENTS} agents and a command a second", commanded)):
        ratios = sorted(there / here for there, here in zip(found, alone, strict=True))
        measured(
            f"beside {what}: {statistics.median(ratios):.3f} of those steps a second ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f})"
        )
