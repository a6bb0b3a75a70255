"""A command's options in a file (TOML): `--config` reads one, `--print-config` writes one.

Its keys are the names of the options. The file is click's `default_map`, so the command line and the environment come
before it, and it comes before the defaults.
"""

import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from controlplane.cli.command_line import noted
from schemas.errors import ConfigError
from schemas.profiler.conversion import did_you_mean, shown

PRINTED: Final = "rolloutctl.print-config"
"""Key in a context's meta: the options are to be printed, and nothing else is done."""
_OWN: Final = frozenset({"--config", "--print-config", "--help"})
AUTO: Final = "auto"


class Needed(click.Option):
    """A required option that may be missing where the options are only printed."""

    def value_is_missing(self, value: Any) -> bool:
        """Whether it must be complained about."""
        return super().value_is_missing(value) and PRINTED not in click.get_current_context().meta


class AutoRange(click.IntRange):
    """A number within bounds, or `auto`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a number, or AUTO."""
        return AUTO if value == AUTO else super().convert(value, param, ctx)


def read_config_file(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Put the values of a file before the defaults: the callback of `--config`. Raises ConfigError."""
    if file is None:
        return
    try:
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
        values[options[key].name or ""] = _checked(file, key, value, options[key], context)
    context.default_map = values


def note_printing(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Note that the options are to be printed: the callback of `--print-config`."""
    if value:
        context.meta[PRINTED] = True


def config_text(context: click.Context) -> str:
    """Return a file of all options, each with its help. What was not set is a comment, with its default."""
    lines = [
        f"# Options of `rolloutctl {context.info_name} --config FILE`. The command line and the environment go first."
    ]
    context.default_map = None  # the help of an option would show its value there as its default
    for option in _options(context):
        value = context.params[option.name or ""] if option.expose_value else noted(context, option.name)
        source = context.get_parameter_source(option.name or "")
        given = source is not ParameterSource.DEFAULT if option.expose_value else bool(value)
        lines += ["", *textwrap.wrap(_help(option, context), 118, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"{'' if given and value is not None else '# '}{_key(option)} = {_toml(_or_empty(option, value))}")
    return "\n".join(lines)


def _options(context: click.Context) -> list[click.Parameter]:
    return [option for option in context.command.get_params(context) if not _OWN & {*option.opts}]


def _key(option: click.Parameter) -> str:
    return max(option.opts, key=len).lstrip("-")


def _help(option: click.Parameter, context: click.Context) -> str:
    names, text = option.get_help_record(context) or ("", "The server's command, for `launch`: a list of words.")
    return f"{names}: {text}" if names else text


def _checked(file: Path, key: str, value: Any, option: click.Parameter, context: click.Context) -> Any:
    """A value of the kind that its option takes. Raises ConfigError."""
    kind, numbers = option.type, isinstance(value, int | float) and not isinstance(value, bool)
    reason = ""
    if option.nargs == -1:
        fits, wanted = isinstance(value, list) and all(isinstance(word, str) for word in value), "a list of strings"
    elif isinstance(option, click.Option) and option.is_flag:
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(kind, AutoRange):
        fits, wanted = (numbers and isinstance(value, int)) or value == AUTO, "a whole number or 'auto'"
    elif isinstance(kind, click.types.IntParamType):
        fits, wanted = numbers and isinstance(value, int), "a whole number"
    elif isinstance(kind, click.types.FloatParamType):
        fits, wanted = numbers, "a number"
    else:
        fits, wanted = isinstance(value, str), "a string"
    if fits and option.nargs != -1:
        try:
            kind.convert(value, option, context)
        except click.BadParameter as error:
            fits, reason = False, error.message
    if not fits:
        raise ConfigError(f"{file}: {key} is {shown(value)}: {reason or f'it must be {wanted}'}")
    return value


def _or_empty(option: click.Parameter, value: object) -> object:
    """What stands for a value that there is not."""
    if value is not None:
        return value
    return False if isinstance(option, click.Option) and option.is_flag else ""


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
