"""What stands between a checkpoint and an engine that would die of a bad one.

An engine server loads by itself, from a path. vLLM 0.32's ends when a reload raises in a worker; SGLang falls back to
unpickling when it finds no safetensors. So the agent reads the files before the engine hears of them: whole, below
the allowed root, and of the model that the engine was launched with.
"""

from pathlib import Path

from schemas.checkpoints import TensorSpec, check, read_layout, require_same_model, resolve
from schemas.commands import Manifest, Source
from schemas.errors import CheckpointError


class Checkpoints:
    """Checkpoints below `root`, for one engine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._launched: tuple[str, dict[str, TensorSpec] | None] = ("", None)

    def check(self, source: Source, manifest: Manifest | None, model: str | None) -> Path:
        """The directory of the source, all of it found good. Raises CheckpointError.

        model: path that the engine was launched from; what lies there says which tensors it takes. When this node
        can't read it (a name on a hub), only a manifest can tell a wrong model, so one is required.
        """
        directory = resolve(self._root, source.path)
        offered = read_layout(directory)
        held = self._held(model)
        if held is not None:
            require_same_model(directory, held, offered)
        elif manifest is None:
            raise CheckpointError(
                f"checkpoint refused: {directory}: the engine was launched from {model or 'an unknown place'}, which "
                "can't be read here, and the command carries no manifest. Nothing tells whether it is the same model. "
                "Nothing was loaded: sync with a manifest."
            )
        if manifest is not None:
            check(directory, manifest)
        return directory

    def _held(self, model: str | None) -> dict[str, TensorSpec] | None:
        if model is None or not Path(model).is_dir():
            return None
        if self._launched[0] != model:
            try:
                self._launched = (model, read_layout(Path(model)))
            except CheckpointError:
                self._launched = (model, None)
        return self._launched[1]
