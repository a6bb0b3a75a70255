"""What TRL trainers of whatever kind have in common: their steps, and what their configuration asks of an engine."""

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
        self._stage.enter_context(self._plane.step(state.global_step + 1))
        if self._rank is not None:
            self._stage.enter_context(self._rank.annotate("step"))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stage.close()


def prompt_ids(prompt: Any, tokenizer: Any, args: Any) -> list[int]:
    """Token ids of a prompt: of a plain string, or of messages by the tokenizer's chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    templated = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(args.chat_template_kwargs or {})
    )
    return list(templated["input_ids"])


def sampling(args: Any) -> dict[str, Any]:
    """The fields of a request that TRL's configuration asks for."""
    named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    fields = {"max_tokens": args.max_completion_length, **{name: getattr(args, name) for name in named}}
    chosen = {name: value for name, value in fields.items() if value is not None}
    return chosen | (getattr(args, "generation_kwargs", None) or {})
