"""What each release of an engine offers a backend, over HTTP and in process: `released/*.jsonl`, read from its source.

Each line is a route, a request class, a method or an attribute, with its releases. Only what a backend may use is
listed. Signatures are Python's; a default that is no literal is `...`. `test_installed.py` compares the newest release
with the engine itself, and prints the lines for a new one:

    surface = read("vllm", "0.32.0")
    surface.routes["/pause"]["POST"].query        # "(mode: Literal['abort', 'wait', 'keep'] = 'abort', ...)"
    openapi(surface)["paths"]["/pause"]
"""

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests import environments

Kind = Literal["sglang", "vllm"]

RELEASED = Path(__file__).with_name("released")
LINES: dict[Kind, list[dict[str, Any]]] = {
    kind: [json.loads(line) for line in (RELEASED / f"{kind}.jsonl").read_text().splitlines()]
    for kind in ("sglang", "vllm")
}
ENGINE: dict[Kind, str] = {"sglang": "TokenizerManager", "vllm": "AsyncLLM"}
"""The class whose methods are called in process."""


def number(version: str) -> tuple[int, ...]:
    """A version as a tuple that can be compared."""
    return tuple(int(part) for part in version.split("."))


RELEASES: dict[Kind, list[str]] = {
    kind: sorted({version for line in lines for version in line["releases"].split()}, key=number)
    for kind, lines in LINES.items()
}
"""Each differs from the one before it in a call that a backend makes."""


INSTALLED: dict[Kind, str] = {"sglang": RELEASES["sglang"][-1], "vllm": environments.VLLM_VERSION}
"""Those that are run."""


class Route(msgspec.Struct, frozen=True):
    """One route, in a server with everything switched on that a trainer needs.

    Attributes:
        by_hand: Query parameters that the handler reads itself, so that openapi.json does not list them.
        body: The signature of its fields, the name of their class, `...` for any JSON, or None.
        required: Whether it needs the body.
        listed: Whether openapi.json lists the body.
    """

    route: str
    methods: str
    query: str = "()"
    by_hand: str = "()"
    body: str | None = None
    required: bool = True
    listed: bool = True


class Surface(msgspec.Struct, frozen=True):
    """One release. `routes` by path and method; `requests` is the module of the request `classes`."""

    kind: Kind
    version: str
    requests: str
    routes: dict[str, dict[str, Route]]
    classes: dict[str, inspect.Signature]
    methods: dict[str, inspect.Signature]
    asynchronous: frozenset[str]
    attributes: frozenset[str]

    def body_fields(self, route: Route) -> list[inspect.Parameter]:
        """The fields of a route's JSON body; none for a route without one."""
        if route.body is None or route.body == "...":
            return []
        found = self.classes.get(route.body) or signature(route.body)
        return list(found.parameters.values())


def signature(text: str) -> inspect.Signature:
    """A signature as it is written; types stay text."""
    scope: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef made{text}: pass", scope)  # our own file
    return inspect.signature(scope["made"])


@cache
def read(kind: Kind, version: str) -> Surface:
    """The surface of a release."""
    lines = [line for line in LINES[kind] if version in line["releases"].split()]
    routes: dict[str, dict[str, Route]] = {}
    for line in lines:
        if "route" in line:
            route = msgspec.convert(line, Route)
            routes.setdefault(route.route, {}).update(dict.fromkeys(route.methods.split(), route))
    return Surface(
        kind,
        version,
        next(line["requests"] for line in lines if "requests" in line),
        routes,
        {line["class"]: signature(line["takes"]) for line in lines if "class" in line},
        {line["method"]: signature(line["takes"]) for line in lines if "method" in line},
        frozenset(line["method"] for line in lines if line.get("async")),
        frozenset(line["attribute"] for line in lines if "attribute" in line),
    )


def openapi(surface: Surface) -> dict[str, Any]:
    """What FastAPI publishes of these routes, as far as our client reads it: names of parameters and body fields."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, methods in surface.routes.items():
        for method, route in methods.items():
            taken = signature(route.query).parameters.values()
            found: dict[str, Any] = {
                "parameters": [{"name": p.name, "in": "query", "required": p.default is p.empty} for p in taken]
            }
            if route.body is not None and route.listed:
                found["requestBody"] = _body(surface, route, f"{path}_{method}", schemas)
            paths.setdefault(path, {})[method.lower()] = found
    return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}


def _body(surface: Surface, route: Route, place: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The body of one method of one path. Its class is added to `schemas`."""
    named = route.body in surface.classes
    schema: dict[str, Any] = {}
    if route.body != "...":
        kind = str(route.body) if named else "Body" + re.sub(r"\W", "_", place)
        schemas[kind] = {"type": "object", "properties": {field.name: {} for field in surface.body_fields(route)}}
        schema = {"$ref": f"#/components/schemas/{kind}"}
    if named and not route.required:
        schema = {"anyOf": [schema, {"type": "null"}]}
    return {"content": {"application/json": {"schema": schema}}} | ({"required": True} if route.required else {})
