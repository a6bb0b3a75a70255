"""A command's options in a file (TOML), which `--config` names.

Its keys are the names of the options. The file is click's `default_map`, so the command line and the environment come
before it, and it comes before the defaults.
"""

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import click

from schemas.errors import ConfigError
from schemas.profiler.conversion import did_you_mean, shown


def read_config_file(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Put the values of a file before the defaults: the callback of `--config`. Raises ConfigError."""
    if file is None:
        return
    try:
        require_trusted(file)
        content = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the options in {file} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    options = {_key(option): option for option in _options(context)}
    values = {}
    for key, value in content.items():
        if key not in options:
            advice = did_you_mean(key, options) or f"; there are {', '.join(options)}"
            raise ConfigError(f"{file}: `rolloutctl {context.info_name}` has no option {key!r}{advice}")
        values[options[key].name or ""] = _as_given(file, key, value, options[key])
    context.default_map = values


def require_trusted(file: Path) -> None:
    """Raise ConfigError if any user of the machine may have written a file that names commands to run."""
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise ConfigError(
            f"every user of this machine can write {file} (mode {stat.S_IMODE(mode):04o}), and it can name commands "
            f"that are run here. Look at what it says, then run `chmod o-w {file}`"
        )


def _options(context: click.Context) -> list[click.Parameter]:
    return [option for option in context.command.params if option.expose_value]


def _key(option: click.Parameter) -> str:
    return max(option.opts, key=len).lstrip("-")


def _as_given(file: Path, key: str, value: Any, option: click.Parameter) -> str | list[str]:
    """A value as the command line would have it, which click checks. Raises ConfigError for a list or a table."""
    if isinstance(value, list) != (option.nargs == -1) or isinstance(value, dict):
        wanted = "a list of strings" if option.nargs == -1 else "one value"
        raise ConfigError(f"{file}: {key} is {shown(value)}: it must be {wanted}")
    if isinstance(value, list):
        return [str(word) for word in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
