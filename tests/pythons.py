"""Installs this checkout, without extras, for each Python that it claims to support, and runs it there.

`python -m tests.pythons` makes a new environment for each version in the classifiers of pyproject.toml. In it, the
packages are imported with warnings as errors, and the recorded runs are verified, replayed and reported. A Python that
is not on this machine is named.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.running import ROOT, environment


def claimed() -> list[str]:
    """The versions of Python in the classifiers."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [found[1] for line in classifiers if (found := re.fullmatch(r".*:: (3\.\d+)", line))]


def interpreter(version: str) -> Path | None:
    """An interpreter of that version: on the path, or among pyenv's."""
    on_path = shutil.which(f"python{version}")
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    for candidate in (*([Path(on_path)] if on_path else []), *pyenv):
        if not subprocess.run(
            [candidate, "-c", ""], capture_output=True
        ).returncode:  # a shim of pyenv may lead nowhere
            return candidate
    return None


def check(python: Path, folder: Path) -> None:
    """Install into a new environment, and run what needs no extra. Raises CalledProcessError."""
    run(folder, python, "-m", "venv", folder / "env")
    run(folder, folder / "env/bin/pip", "--quiet", "--disable-pip-version-check", "install", ROOT)
    python, rolloutctl = folder / "env/bin/python", folder / "env/bin/rolloutctl"
    run(folder, python, "-W", "error", "-c", "import controlplane, schemas, workers; controlplane.ControlPlane")
    for log in sorted((ROOT / "tests" / "replays").glob("*.db")):
        shutil.copy(log, folder)
        run(folder, rolloutctl, "log", "verify", log.name)
        run(folder, rolloutctl, "log", "replay", log.name)
    run(folder, rolloutctl, "report", log.name)


def run(folder: Path, *command: object) -> None:
    subprocess.run([str(word) for word in command], cwd=folder, env=surroundings(folder), check=True, timeout=300)


def surroundings(folder: Path) -> dict[str, str]:
    """The installed package and the modules in the folder are found, this checkout is not."""
    return environment({"PYTHONPATH": str(folder)})


def main() -> int:
    """Check each version that is claimed. The exit code is 1 if none is here."""
    checked = []
    for version in claimed():
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: not on this machine, so not checked", flush=True)  # noqa: T201
            continue
        with tempfile.TemporaryDirectory() as folder:
            check(python, Path(folder))
        checked.append(version)
        print(f"Python {version}: {python}: works", flush=True)  # noqa: T201
    return int(not checked)


if __name__ == "__main__":
    sys.exit(main())
