"""What one release of an engine can be asked, over HTTP and in process, and the openapi.json that its server publishes.

surface = read("vllm", "0.32.0")
surface.route("POST", "/pause").query           # (Field("mode", "Literal['abort', 'wait', 'keep']", "abort"), ...)
surface.shapes["StartProfileRequest"]["max_iterations"].default
surface.methods["pause_generation"].signature
openapi(surface, launched=frozenset())          # of a server without dev mode and without a profiler
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
from tests.engines.shapes import Expression, Field, Made, Method, Shape, read_attributes, read_methods, read_shape
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

    def served(self, launched: frozenset[str] = LAUNCHED) -> dict[str, dict[str, Route]]:
        """path -> method -> the route that answers, in a server of which the conditions in `launched` hold."""
        found: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            if all(holds(condition, launched) for condition in route.conditions):
                for method in sorted(route.methods):
                    found.setdefault(route.path, {}).setdefault(method, route)
        return found

    def route(self, method: str, path: str, launched: frozenset[str] = LAUNCHED) -> Route | None:
        """The route that answers, or None."""
        return self.served(launched).get(path, {}).get(method)

    def body_fields(self, route: Route) -> tuple[Field, ...]:
        """The fields of a route's JSON body; none for a route without one."""
        if route.body is None:
            return ()
        return route.body.fields if route.body.shape is None else self.shapes[route.body.shape].fields


def holds(condition: str, launched: frozenset[str]) -> bool:
    """Whether a condition names what the server was launched with; `not (...)` when its inner one does not."""
    inner = condition.removeprefix("not (")
    return (inner != condition) != any(word in inner for word in launched)


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
    requests = one_holding(tree, REQUESTS[kind])
    if requests is not None:
        found = {name: one for name, one in requests.definitions.items() if isinstance(one.node, ast.ClassDef)} | found
    engine = one_holding(tree, ENGINE[kind])
    assert engine is not None, f"{kind} {version} has no class {ENGINE[kind]}"
    definition = engine.definitions[ENGINE[kind]]
    return Surface(
        kind,
        version,
        tuple(reader.routes),
        MappingProxyType({name: read_shape(tree, one) for name, one in found.items()}),
        "" if requests is None else requests.name,
        ENGINE[kind],
        MappingProxyType(read_methods(tree, definition)),
        read_attributes(tree, definition),
    )


def one_holding(tree: Tree, name: str) -> Module | None:
    """The one module that defines a class of this name. None: it has not come yet, or is gone."""
    modules = tree.holding(rf"^class {name}\b")
    assert len(modules) < 2, f"{name} is defined in {[module.name for module in modules]}: say which one is meant"
    return modules[0] if modules else None


# --- openapi.json -----------------------------------------------------------------------------------------------------


def openapi(surface: Surface, launched: frozenset[str] = LAUNCHED) -> dict[str, Any]:
    """What FastAPI publishes of these routes: paths, parameters, bodies and the classes they are made of."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, methods in surface.served(launched).items():
        for method, route in methods.items():
            if route.listed:
                plain = re.sub(r"{(\w+):\w+}", r"{\1}", path)
                paths.setdefault(plain, {})[method.lower()] = operation(surface, route, plain, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "FastAPI", "version": "0.1.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def operation(surface: Surface, route: Route, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """One method of one path. Classes that its body is made of are added to `schemas`."""
    name = re.sub(r"\W", "_", f"{route.handler}{path}") + f"_{min(route.methods).lower()}"
    said: dict[str, Any] = {"operationId": name, "responses": {"200": {"description": "Successful Response"}}}
    in_path = [{"name": one, "in": "path", "required": True, "schema": {}} for one in re.findall(r"{(\w+)}", path)]
    in_query = [
        {"name": one.name, "in": "query", "required": one.required, "schema": field_schema(surface, one, schemas)}
        for one in route.query
    ]
    if in_path or in_query:
        said["parameters"] = in_path + in_query
    body = route.body
    if body is not None and body.listed:
        schema: dict[str, Any] = {}
        if body.shape is not None:
            schema = reference(surface, body.shape, schemas)
        elif not body.open:
            schemas[f"Body_{name}"] = object_schema(surface, f"Body_{name}", body.fields, schemas)
            schema = {"$ref": f"#/components/schemas/Body_{name}"}
        if body.shape is not None and not body.required:
            schema = {"anyOf": [schema, {"type": "null"}]}
        said["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        said["requestBody"] |= {"required": True} if body.required else {}
    return said


def reference(surface: Surface, name: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to a class, which is added to `schemas` with what it is made of."""
    if name not in schemas:
        schemas[name] = {}
        shape = surface.shapes[name]
        if shape.form == "enum":
            schemas[name] = {"title": name, "enum": [field.default for field in shape.fields]}
        else:
            schemas[name] = object_schema(surface, name, shape.fields, schemas)
    return {"$ref": f"#/components/schemas/{name}"}


def object_schema(surface: Surface, name: str, fields: tuple[Field, ...], schemas: dict[str, Any]) -> dict[str, Any]:
    required = [field.name for field in fields if field.required]
    return {
        "title": name,
        "type": "object",
        "properties": {field.name: field_schema(surface, field, schemas) for field in fields},
        **({"required": required} if required else {}),
    }


def field_schema(surface: Surface, field: Field, schemas: dict[str, Any]) -> dict[str, Any]:
    said = type_schema(surface, ast.parse(field.type, mode="eval").body, schemas) if field.type else {}
    if not field.required and not isinstance(field.default, Expression | Made):
        said = {**said, "default": field.default}
    return said


def type_schema(surface: Surface, node: ast.expr, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of a written type; {} for types that are neither plain nor classes of this release."""
    plain = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
    match node:
        case ast.Constant(value=None):
            return {"type": "null"}
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return {"anyOf": [type_schema(surface, side, schemas) for side in (left, right)]}
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            listed = ast.literal_eval(values)
            return {"enum": list(listed) if isinstance(listed, tuple) else [listed]}
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return {"anyOf": [type_schema(surface, inner, schemas), {"type": "null"}]}
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=sides)):
            return {"anyOf": [type_schema(surface, side, schemas) for side in sides]}
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inner):
            return {"type": "array", "items": type_schema(surface, inner, schemas)}
        case ast.Subscript(value=ast.Name(id="dict" | "Dict")) | ast.Name(id="dict" | "Dict"):
            return {"type": "object"}
        case ast.Name(id="list" | "List"):
            return {"type": "array"}
        case ast.Name(id=name) if name in plain:
            return {"type": plain[name]}
        case ast.Name(id=name) if name in surface.shapes:
            return reference(surface, name, schemas)
    return {}
