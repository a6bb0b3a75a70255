"""Deltas of the models that real engines serve, and what is seen of a sync that names one."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from controlplane import ControlPlane
from schemas.commands import Checkpoint
from schemas.outcomes import Acted
from schemas.reports import SyncReport
from tests.engines.models import save_weights, weights
from tests.engines.reports import conclusions

LAYER: Final = "model.layers.3."
CLOSED: Final = (
    *(f"{LAYER}self_attn.{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")),
    *(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("lm_head.weight", "model.layers.5.self_attn.o_proj.weight", "model.norm.weight"),
)
"""All tensors of each module that vLLM fuses, and some that it does not."""
SPLIT: Final = (f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.q_proj.bias", f"{LAYER}mlp.gate_proj.weight")
"""Parts of fused modules."""


def save_changed(folder: Path, name: str, base: int, names: tuple[str, ...]) -> None:
    """Write weights that differ from those of the seed `base` in the named tensors, and beside them only those."""
    changed = {key: tensor * 1.5 + 0.25 for key, tensor in weights(base).items() if key in names}
    assert len(changed) == len(names)
    save_weights(folder / name, weights(base) | changed)
    save_weights(folder / f"{name}-delta", changed)


class Deltas:
    """Syncs weights by their delta."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def sync(self, path: str, base: int = 0, **options: object) -> SyncReport:
        """Bring the fleet to weights, by their delta if there is a base."""
        source = Checkpoint(path, f"{path}-delta", base) if base else Checkpoint(path)
        return self.plane.sync_weights(None, source, timeout=60, **options).wait()  # type: ignore[arg-type]

    def same_as_whole(self, path: str, base: int, tokens: Callable[[], object]) -> SyncReport:
        """Bring the fleet to weights by their delta, then again by all of them: what it generates is the same."""
        by_delta = self.sync(path, base, content=True)
        assert by_delta.status == "committed", by_delta
        generated = tokens()
        whole = self.sync(path)
        assert whole.status == "committed" and whole.by_delta == () and tokens() == generated
        return by_delta


def took(report: SyncReport) -> dict[str, str]:
    """What each engine took, as its agent answered to the load."""
    loads = conclusions(report.phases[1]).items()
    return {agent: load.took for agent, load in loads if isinstance(load, Acted)}
