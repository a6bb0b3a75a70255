"""What verl loads at its start, by the entry point group `verl.plugins`: the names of our trainers, and nothing else.

Every process of verl (0.9.1) imports this, while verl itself is half imported, and swallows whatever it raises. So it
imports next to nothing, and waits until verl imports its V1 trainers, which only the task runner does.
What goes wrong after that is raised when one of our trainers is asked for, and never before.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from controlplane.shadowing import refuse_foreign

TRAINERS: Final = "verl.trainer.ppo.v1"
"""The package that imports verl's V1 trainers; it has `register_trainer`."""
MODES: Final = {
    "sync": "PPOTrainerSync",
    "colocate_async": "PPOTrainerColocateAsync",
    "separate_async": "PPOTrainerSeparateAsync",
}
"""verl's trainer modes, and their classes in that package."""
PREFIX: Final = "rolloutctl_"
_REGISTERED: Final = "_rolloutctl"
"""Set on that package once it has our trainers, however often this module is loaded."""


class _AfterImport(MetaPathFinder):
    """Registers our trainers once verl's own have been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """See to it that our trainers are registered. Idempotent: a process may load the plugin twice."""
    if TRAINERS in sys.modules:
        register(sys.modules[TRAINERS])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def register(verl_trainers: Any) -> None:
    """Register a trainer for each of verl's modes; in place of one that can't work, one that raises the reason."""
    if hasattr(verl_trainers, _REGISTERED):
        return
    setattr(verl_trainers, _REGISTERED, True)
    for mode, base_name in MODES.items():
        base = getattr(verl_trainers, base_name, verl_trainers.PPOTrainer)
        name = f"Rolloutctl{base_name}"
        try:
            refuse_foreign()
            trainer = importlib.import_module("controlplane.trainers.verl.trainer")
            cls = type(name, (trainer.RolloutctlTrainer, base), {"mode": mode})
        except Exception as error:
            cls = type(name, (base,), {"__init__": _raising(mode, error)})
        try:
            verl_trainers.register_trainer(PREFIX + mode)(cls)
        except ValueError as error:  # the name is taken
            from schemas.logs import logger_of

            text = "trainer.v1.trainer_mode=%s%s is another's plugin, and not rolloutctl: %s"
            logger_of("verl").error(text, PREFIX, mode, error)


def _raising(mode: str, cause: Exception) -> Any:
    def __init__(self: object, config: object) -> None:
        raise RuntimeError(
            f"trainer.v1.trainer_mode={PREFIX}{mode} can't be used: {type(cause).__name__}: {cause}. "
            f"trainer.v1.trainer_mode={mode} is verl without rolloutctl."
        ) from cause

    return __init__


install()
