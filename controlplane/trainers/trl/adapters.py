"""LoRA adapters of PEFT: what engines get of a model of which nothing else is trained.

Nothing here imports PEFT: a model is asked for what every `PeftModel` has, as of peft 0.21.2.
"""

import shutil
from pathlib import Path
from typing import Any, Final

from controlplane.plane import ControlPlane
from controlplane.trainers.completions import NewestAdapter
from schemas.errors import ConfigError

ADAPTER: Final = "policy"
"""What the bus calls the adapter that is trained."""


def adapter_of(model: Any) -> str:
    """Return what the bus calls the adapter that is trained; empty if the whole model is. Raises as `active_of`."""
    return ADAPTER if hasattr(model, "peft_config") and active_of(model) else ""


def newest_of(plane: ControlPlane) -> NewestAdapter:
    """Return what looks up the newest version of the adapter, and which replicas hold it."""
    return lambda: plane.adapters().get(ADAPTER)


def active_of(model: Any) -> str:
    """Return PEFT's name of the adapter that is trained. Raises ConfigError if there is not exactly one."""
    active = model.active_adapters
    if not isinstance(active, list) or len(active) != 1:
        raise ConfigError(
            f"the active adapters of the model are {active}: engines serve one, of a PeftModel (peft.get_peft_model)"
        )
    return str(active[0])


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter that is trained, and no other, as PEFT does. What engines can't serve, they refuse."""
    name = active_of(model)
    model.save_pretrained(folder, selected_adapters=[name])
    if name != "default":  # PEFT puts it into a folder of its own
        shutil.copytree(folder / name, folder, dirs_exist_ok=True)
        shutil.rmtree(folder / name)
