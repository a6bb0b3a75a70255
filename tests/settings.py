"""The tables of docs/settings.md, made from the code. `python -m tests.settings` writes them."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Final

import click
import msgspec

from controlplane.cli.agent import SECTIONS, agent
from schemas.config import AgentConfig, BusConfig, ObservePolicy
from tests.running import ROOT

PAGE: Final = ROOT / "docs" / "settings.md"
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_FIELD: Final = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def fields(struct: type[msgspec.Struct]) -> Iterator[str]:
    """A line for each field: name, default, what it is."""
    doc = inspect.getdoc(struct) or ""
    described = {name: " ".join(text.split()) for name, text in _FIELD.findall(doc)}
    yield "| setting | default | what it is |"
    yield "| --- | --- | --- |"
    for field in msgspec.structs.fields(struct):
        default = f'"{field.default}"' if isinstance(field.default, str) else f"{field.default}"
        yield f"| `{field.name}` | `{default}` | {described[field.name]} |"


def options() -> Iterator[str]:
    """A line for each option of `rolloutctl agent`: name, variable, key in a file, default, what it is."""
    parameters = {option.name: option for option in agent.params}
    yield "| option | variable | what it is |"
    yield "| --- | --- | --- |"
    for heading, names in SECTIONS.items():
        yield f"| **{heading}** | | |"
        for name in names:
            option = parameters[name]
            assert isinstance(option, click.Option) and option.help
            default = option.default if isinstance(option.default, str | int | float) else False
            shown = "" if default is False or "[default" in option.help else f" [default: {default}]"
            variable = option.envvar or f"ROLLOUTCTL_AGENT_{name.upper()}"
            yield f"| `{option.opts[0]}` | `{variable}` | {option.help.replace('  [', ' [')}{shown} |"


TABLES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "bus": lambda: fields(BusConfig),
    "observe": lambda: fields(ObservePolicy),
    "agent": options,
    "agent_config": lambda: fields(AgentConfig),
}


def written(page: str) -> str:
    """The page with the tables that the code has now."""
    return _TABLE.sub(lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
