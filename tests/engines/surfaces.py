"""What one release of an engine offers, over HTTP and in process, and the openapi.json that its server publishes.

surface = read("vllm", "0.32.0")
surface.served()["/pause"]["POST"].query        # (Field("mode", "Literal['abort', 'wait', 'keep']", "abort"), ...)
surface.shapes["StartProfileRequest"].fields
surface.methods["pause_generation"].signature
openapi(surface)["paths"]["/pause"]
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from tests.engines import wheels
from tests.engines.routes import Reader, Route
from tests.engines.shapes import Field, Method, Shape, read_attributes, read_methods, read_shape
from tests.engines.sources import Module, Tree

ENGINE: dict[wheels.Kind, str] = {"sglang": "TokenizerManager", "vllm": "AsyncLLM"}
"""The class whose methods are called in process."""

REQUESTS: dict[wheels.Kind, str] = {"sglang": "PauseGenerationReqInput", "vllm": "WeightTransferInitRequest"}
"""A class that lies in the module of the request classes, which all are read."""

LAUNCHED = frozenset({"VLLM_SERVER_DEV_MODE", "profiler_config", "'generate' in supported_tasks", "enable_metrics"})
"""Words of conditions that hold for a text model's server with everything switched on that a trainer needs."""


@dataclass(frozen=True)
class Surface:
    """One release.

    routes: in the order in which they are put into the app.   shapes: request classes by name.
    requests: module of the request classes.   methods, attributes: of `engine`, the in-process class.
    """

    kind: wheels.Kind
    version: str
    routes: tuple[Route, ...]
    shapes: Mapping[str, Shape]
    requests: str
    engine: str
    methods: Mapping[str, Method]
    attributes: frozenset[str]

    def served(self) -> dict[str, dict[str, Route]]:
        """path -> method -> the route that answers, in a server of which the conditions in `LAUNCHED` hold."""
        found: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            if all(holds(condition) for condition in route.conditions):
                for method in sorted(route.methods):
                    found.setdefault(route.path, {}).setdefault(method, route)
        return found

    def body_fields(self, route: Route) -> tuple[Field, ...]:
        """The fields of a route's JSON body; none for a route without one."""
        if route.body is None:
            return ()
        return route.body.fields if route.body.shape is None else self.shapes[route.body.shape].fields


def holds(condition: str) -> bool:
    """Whether a condition names what the server was launched with; `not (...)` when its inner one does not."""
    inner = condition.removeprefix("not (")
    return (inner != condition) != any(word in inner for word in LAUNCHED)


@cache
def read(kind: wheels.Kind, version: str) -> Surface:
    """The surface of a release; its wheel is fetched when it is not there."""
    tree = Tree(wheels.source(kind, version))
    reader = Reader(tree)
    if kind == "sglang":
        for module in tree.holding(r'^@app\.post\("/pause_generation"\)'):
            reader.read_app(module, "lifespan")
    else:
        for module in tree.holding(r"^def build_app\("):
            if module.name != "vllm.entrypoints.api_server":  # an example beside the real server
                reader.read_app(module, "build_app")
    found = dict(reader.shapes)
    requests = module_defining(tree, REQUESTS[kind])
    if requests is not None:
        found = {
            name: entry for name, entry in requests.definitions.items() if isinstance(entry.node, ast.ClassDef)
        } | found
    engine = module_defining(tree, ENGINE[kind])
    assert engine is not None, f"{kind} {version} has no class {ENGINE[kind]}"
    definition = engine.definitions[ENGINE[kind]]
    return Surface(
        kind,
        version,
        tuple(reader.routes),
        MappingProxyType({name: read_shape(tree, entry) for name, entry in found.items()}),
        "" if requests is None else requests.name,
        ENGINE[kind],
        MappingProxyType(read_methods(tree, definition)),
        read_attributes(tree, definition),
    )


def module_defining(tree: Tree, name: str) -> Module | None:
    """Return the module that defines a class of this name; None if this release has none."""
    modules = tree.holding(rf"^class {name}\b")
    assert len(modules) < 2, f"{name} is defined in {[module.name for module in modules]}: say which one is meant"
    return modules[0] if modules else None


# --- openapi.json -----------------------------------------------------------------------------------------------------


def openapi(surface: Surface) -> dict[str, Any]:
    """What FastAPI publishes of these routes, as far as our client reads it: names of parameters and body fields."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, methods in surface.served().items():
        for method, route in methods.items():
            plain = re.sub(r"{(\w+):\w+}", r"{\1}", path)
            paths.setdefault(plain, {})[method.lower()] = operation(surface, route, plain, schemas)
    return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}


def operation(surface: Surface, route: Route, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """One method of one path. The class of its body is added to `schemas`."""
    in_path = [{"name": name, "in": "path", "required": True} for name in re.findall(r"{(\w+)}", path)]
    in_query = [{"name": field.name, "in": "query", "required": field.required} for field in route.query]
    found: dict[str, Any] = {"parameters": in_path + in_query} if in_path or in_query else {}
    body = route.body
    if body is not None and body.listed:
        name = re.sub(r"\W", "_", f"{route.handler}{path}") + f"_{min(route.methods).lower()}"
        kind = body.shape or f"Body_{name}"
        schema: dict[str, Any] = {} if body.open else {"$ref": f"#/components/schemas/{kind}"}
        if not body.open:
            schemas[kind] = {"type": "object", "properties": {field.name: {} for field in surface.body_fields(route)}}
        if body.shape is not None and not body.required:
            schema = {"anyOf": [schema, {"type": "null"}]}
        found["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        found["requestBody"] |= {"required": True} if body.required else {}
    return found
