"""What is written of the newest release is what the engine has that is installed: signatures, classes and routes."""

import json
import os
import subprocess
from inspect import Signature
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import environments
from tests.engines.surfaces import INSTALLED, Kind, openapi, read, signature

pytestmark = pytest.mark.timeout(900)  # the environment of an engine may have to be built

ROOT = Path(__file__).parents[2]
KINDS = [pytest.param("vllm", marks=pytest.mark.engine_vllm), pytest.param("sglang", marks=pytest.mark.engine_sglang)]


def needs(found: Signature) -> list[tuple[str, str, bool]]:
    """Name, kind and need of each parameter: types are written differently."""
    return [(name, entry.kind.name, entry.default is entry.empty) for name, entry in found.parameters.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_methods_and_request_classes_are_those_of_the_installed_engine(kind: Kind, tmp_path: Path) -> None:
    surface = read(kind, INSTALLED[kind])
    paths = os.pathsep.join([str(ROOT), *([str(environments.STANDINS)] if kind == "sglang" else [])])
    settings = {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [str(environments.python(kind)), "-m", "tests.engines.installed", kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | settings, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    methods = {line["method"]: line for line in lines if "method" in line}
    classes = {line["class"]: line for line in lines if "class" in line}
    assert {name: needs(signature(line["takes"])) for name, line in methods.items()} == {
        name: needs(takes) for name, takes in surface.methods.items()
    }
    assert {name for name, line in methods.items() if "async" in line} == surface.asynchronous
    assert {name: needs(signature(line["takes"])) for name, line in classes.items()} == {
        name: needs(surface.classes[name]) for name in classes
    }


def listed(document: dict[str, Any], path: str, method: str) -> tuple[set[tuple[str, bool]], set[str]]:
    """The query parameters, each with its need, and the body's fields of an operation in an openapi.json."""
    operation = document["paths"][path][method]
    query = {(entry["name"], entry["required"]) for entry in operation.get("parameters", ()) if entry["in"] == "query"}
    text = json.dumps(operation.get("requestBody", {}))
    schemas = document["components"]["schemas"]
    bodies = [schema for name, schema in schemas.items() if f'schemas/{name}"' in text]
    return query, {field for schema in bodies for field in schema.get("properties", {})}


@pytest.mark.parametrize("kind", KINDS)
def test_routes_are_those_of_a_running_server(kind: Kind, request: pytest.FixtureRequest) -> None:
    fleet = request.getfixturevalue(f"{kind}_fleet")
    real = httpx.get(f"{fleet.first.url if kind == 'vllm' else fleet.urls[0]}/openapi.json", timeout=60).json()
    ours = openapi(read(kind, INSTALLED[kind]))
    for path, methods in ours["paths"].items():
        if "lora" in path and path not in real["paths"]:
            continue  # vLLM has them where it was launched for them
        for method in methods:
            if ours["paths"][path][method].get("requestBody", {}) != {"content": {"application/json": {"schema": {}}}}:
                assert listed(ours, path, method) == listed(real, path, method), (path, method)
