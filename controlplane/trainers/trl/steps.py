"""The steps of a TRL trainer, of whatever kind."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import trl
from transformers import TrainerCallback

from controlplane.plane import ControlPlane
from schemas.logs import logger_of

if TYPE_CHECKING:
    from workers.profilers import TrainingRank

logger = logger_of("trainers")

TESTED_VERSIONS: Final = ("1.16.0",)
"""Versions of TRL that this was run with."""


def warn_of_unseen() -> None:
    """Log a version of TRL that this was not run with."""
    if trl.__version__ not in TESTED_VERSIONS:
        logger.warning(
            "trl %s was not seen before: rolloutctl was run with %s", trl.__version__, ", ".join(TESTED_VERSIONS)
        )


class BusSteps(TrainerCallback):  # type: ignore[misc]
    """Tells the bus where each step of a TRL trainer begins and ends: steps are profiled as configured.

    Step 1 is the first: `state.global_step` counts those completed. TRL generates and updates inside of a step.

    Args:
        plane: The open control plane.
        rank: The training rank of this process, if it is profiled too; each step is one of its stages.
    """

    def __init__(self, plane: ControlPlane, rank: "TrainingRank | None" = None) -> None:
        warn_of_unseen()
        self._plane, self._rank = plane, rank
        self._stage = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stage.close()  # of a step that an exception cut off
        self._plane.begin_step(state.global_step + 1)
        self._stage.callback(self._plane.end_step)
        if self._rank is not None:
            self._stage.enter_context(self._rank.annotate("step"))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stage.close()
