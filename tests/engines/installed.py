"""Prints the lines of `released/KIND.jsonl` for the engine that is installed here; its own Python runs this.

    PYTHONPATH=. $(python -m tests.environments vllm) -m tests.engines.installed vllm

Those of methods and request classes: routes are in the openapi.json of a server.
"""

import ast
import inspect
import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tests.engines.surfaces import ENGINE, INSTALLED, LINES, Kind, read

MODULE: dict[Kind, str] = {"sglang": "sglang.srt.managers.tokenizer_manager", "vllm": "vllm.v1.engine.async_llm"}


def written(function: Callable[..., Any]) -> str:
    """The signature as text. A default that is no literal is `...`; a type that is no Python is left out."""

    def parses(text: str, read: Callable[[str], object]) -> bool:
        try:
            read(text)
        except (ValueError, SyntaxError):
            return False
        return True

    def plain(parameter: inspect.Parameter) -> inspect.Parameter:
        if not parses(inspect.formatannotation(parameter.annotation), ast.parse):
            parameter = parameter.replace(annotation=parameter.empty)
        if parameter.default is parameter.empty or parses(repr(parameter.default), ast.literal_eval):
            return parameter
        return parameter.replace(default=...)

    found = inspect.signature(function)
    kept = [plain(parameter) for name, parameter in found.parameters.items() if name != "self"]
    return str(found.replace(parameters=kept, return_annotation=found.empty)).replace("Ellipsis", "...")


def main(kind: Kind) -> None:
    engine = getattr(import_module(MODULE[kind]), ENGINE[kind])
    requests = import_module(read(kind, INSTALLED[kind]).requests)
    for what, holder in (("class", requests), ("method", engine)):
        for name in dict.fromkeys(line[what] for line in LINES[kind] if what in line):
            if callable(found := getattr(holder, name, None)):
                extra = {"async": True} if inspect.iscoroutinefunction(found) else {}
                print(json.dumps({what: name, "takes": written(found), **extra}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])  # type: ignore[arg-type]
