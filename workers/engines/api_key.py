"""The API key of an engine's server, or of the router in front of it. It loads no HTTP client."""

import os
from pathlib import Path
from typing import Final

from schemas.errors import ConfigError

KEY_VARIABLE: Final = "ROLLOUTCTL_ENGINE_API_KEY"
"""Holds the engine's key. The same name with `_FILE` appended holds the path of a file that contains the key."""


def api_key(file: Path | None = None, variable: str = KEY_VARIABLE) -> str | None:
    """Return the key in `file`, else in the file that `<variable>_FILE` names, else in `variable`, else None.

    Raises ConfigError.
    """
    named = os.environ.get(f"{variable}_FILE")
    file = file or (Path(named) if named else None)
    if file is None:
        return os.environ.get(variable) or None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key can't be read from {file}: {error}.") from None
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"{file} holds no key: one line of printable ASCII characters is expected.")
    return key
