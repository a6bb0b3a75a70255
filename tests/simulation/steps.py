"""A trainer that goes through its steps, and profiles some: `controlplane.machine.profiling` says which sessions that
opens and closes. Judged by a model of its own: to which session each step belongs.

It has a luck of its own, and steps that no other command of the run names.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from controlplane.machine.profiling import (
    check_command,
    collect_command,
    commands_after,
    commands_before,
    finish_command,
    ranks_absent,
    roles_absent,
    session_after,
    sessions,
)
from schemas.commands import Finish, ProfileCommand, ProfilePlan, Target
from schemas.identity import ROLLOUT, Identity
from schemas.outcomes import Acted
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report

if TYPE_CHECKING:
    from tests.simulation.cluster import World

FIRST, LAST = 1000, 1012


class Steps:
    """The steps of one trainer, through all lives of its bus."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, random.Random(f"steps {world.seed}")
        rng = self.rng
        self.enabled = rng.random() < 0.3
        own = frozenset(step for step in range(FIRST, LAST) if rng.random() < 0.6) if rng.random() < 0.5 else None
        finish = Finish(relocate=True) if rng.random() < 0.5 else Finish()
        ranks = frozenset(rng.sample(range(6), 2)) if rng.random() < 0.3 else None
        replicas = frozenset({rng.randrange(4)}) if rng.random() < 0.2 and ranks is None else None
        plan = ProfilePlan(steps=own, finish=finish, ranks=ranks, replicas=replicas, enabled=rng.random() < 0.8)
        roles = {"actor": ProfilePlan(enabled=rng.random() < 0.7)} if rng.random() < 0.5 else {}
        chosen = tuple(step for step in range(FIRST, LAST) if rng.random() < 0.7)
        self.config = ProfilerConfig(plan=plan, roles=roles, steps=chosen, continuous=rng.random() < 0.6)
        self.belongs = self._belongs()
        self.session: int | None = None
        self.step = FIRST - 1
        self.opened: set[int] = set()

    def _belongs(self) -> dict[int, int]:
        """The first step of the session that each step to profile belongs to."""
        plans = [plan for plan in (self.config.plan, *self.config.roles.values()) if plan.enabled]
        belongs: dict[int, int] = {}
        for step in self.config.steps if plans else ():
            changes = any(plan.steps is not None and len({step - 1, step} & plan.steps) == 1 for plan in plans)
            goes_on = self.config.continuous and step - 1 in belongs and not changes
            belongs[step] = belongs[step - 1] if goes_on else step
        return belongs

    def begin(self) -> None:
        """Begin with the first step, if this trainer profiles."""
        if list(sessions(self.config)) != sorted(set(self.belongs.values())):
            self._broken(f"sessions are {sessions(self.config)}, by the steps {self.belongs}")
        if self.enabled:
            self.world.at(self.rng.randrange(3000), self._next)

    def _broken(self, text: str) -> None:
        self.world.promises.broken("I7 windows close", f"{text}, of {self.config}")

    def _next(self) -> None:
        """End a step and begin the next one, or a later one."""
        bus = self.world.bus
        if not self.world.trainer.busy or self.step > LAST:
            return
        self.world.at(self.rng.randrange(300, 4000), self._next)
        if bus is None or not bus.alive:
            return
        ended, open_before = self.step, self.session
        self._publish(commands_after(self.config, self.session, ended))
        goes_on = open_before is not None and self.belongs.get(ended + 1) == self.belongs.get(ended)
        goes_on = goes_on and ended in self.belongs
        if self.session != (open_before if goes_on else None):
            self._broken(f"after step {ended} session {self.session} is open, before it was {open_before}")
        self.step += 1 if self.rng.random() < 0.8 else self.rng.randrange(2, 4)
        self._check()
        open_before, begun = self.session, self.step
        self._publish(commands_before(self.config, self.session, begun))
        same = open_before is not None and self.belongs.get(open_before) == self.belongs.get(begun, -1)
        if self.session != (open_before if same else begun if begun in self.belongs else None):
            self._broken(f"in step {begun} session {self.session} is open, before it was {open_before}")
        if self.step > LAST:
            self._finish()

    def _publish(self, commands: tuple[ProfileCommand, ...]) -> None:
        bus = self.world.bus
        for command in commands:
            self.session = session_after(self.session, command)
            if command.action == "start":
                self.opened.add(command.step)
            if bus is not None:
                self.world.trainer.issue(bus, command, Target(), 3000)

    def _check(self) -> None:
        left = min((step for step in self.belongs if step >= self.step), default=None)
        check = check_command(self.config, self.step)
        if (check.step if check is not None else None) != left or (check is not None and check.action != "check"):
            self._broken(f"the check before step {self.step} is {check}, the first to profile is {left}")
        fleet = [slot.identity for slot in self.world.slots]
        plan, rollouts = self.config.plan, [place for place in fleet if place.role == ROLLOUT]
        owned = {rank for place in rollouts for rank in place.global_ranks}
        replicas = {place.replica for place in rollouts}
        absent = ({*(plan.ranks or ())} - owned) | ({*(plan.replicas or ())} - replicas) if plan.enabled else set()
        if ranks_absent(self.config, fleet) != absent:
            self._broken(f"absent are {ranks_absent(self.config, fleet)} of {fleet}, by the plan {absent}")
        actors = any(place.role == "actor" for place in fleet)
        wanted = [role for role, plan in self.config.roles.items() if plan.enabled and not actors]
        if roles_absent(self.config, fleet) != wanted:
            self._broken(f"absent roles are {roles_absent(self.config, fleet)}, by the plans {wanted}")

    def _finish(self) -> None:
        command, bus = finish_command(self.config, self.opened), self.world.bus
        plans = [plan for plan in (self.config.plan, *self.config.roles.values()) if plan.enabled]
        wanted = bool(self.opened) and any(plan.finish != Finish() for plan in plans)
        if (command is not None) != wanted:
            self._broken(f"the last command is {command}, opened were {sorted(self.opened)}")
        if command is not None and bus is not None:
            due = {first for first in self.belongs.values() if first <= max(self.opened)}
            if set(command.profiled_steps) != due | self.opened or command.step != max(self.opened):
                self._broken(f"{command} ends {sorted(self.opened)}")
            self.world.trainer.issue(bus, command, Target(), 6000)

    def concluded(self, report: Report, places: dict[str, Identity]) -> str:
        """Judge what follows a stop, and ask for it: replicas of several nodes whose first node stopped collect."""
        command, found = report.command, collect_command(report)
        if not isinstance(command, ProfileCommand) or command.action != "stop":
            return f"after {command} follows {found}" if found is not None else ""
        several = {places[line.agent].replica for line in report.outcomes if places[line.agent].node_rank}
        stopped = {
            places[line.agent].replica
            for line in report.outcomes
            if places[line.agent].agent == f"{places[line.agent].replica}.0" and isinstance(line.conclusion, Acted)
        }
        due = several & stopped
        if (set(found[1].replicas or ()) if found is not None else set()) != due:
            return f"after {report} follows {found}, due are {due}"
        bus = self.world.bus
        if found is not None and bus is not None and bus.alive and self.world.trainer.busy and command.step >= FIRST:
            self.world.at(0, self.world.trainer.issue, bus, *found, 3000)
        return "" if found is None or (found[0].action, found[0].step) == ("collect", command.step) else f"{found}"
