"""How long a real SGLang takes to get the weights of its launch: from disk, and copied from a running one, in turn.

    python -m tests.engines.launch_cost     # prints one line of JSON; about five minutes

Both as a new replica does it: read from a checkpoint that is in the page cache, from one that is not, and copied over
gloo on one machine. The seconds are those of SGLang's own log; their ratio is of one run. The seed is idle.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.engines.models import Size, save_model
from tests.engines.servers import EngineServer, free_port

ROUNDS = 3
LARGE = Size(hidden=2048, layers=16, heads=32, kv_heads=4)
LOADED = re.compile(r"Load weight end\. elapsed=([\d.]+) s")


def loaded_s(model: Path, folder: Path, options: Sequence[str]) -> float:
    """Launch a server. Returns how long its weights took."""
    with EngineServer("sglang", model, folder, *options) as server:
        server.wait_up()
        assert ("Loading weights from remote instance" in server.output) == bool(options)
        (seconds,) = LOADED.findall(server.output)
        server.log.unlink()
        return float(seconds)


def forget(model: Path) -> None:
    """Have the kernel drop what it keeps of the checkpoint."""
    for file in model.glob("*.safetensors"):
        opened = os.open(file, os.O_RDONLY)
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def main() -> None:
    found: dict[str, list[float]] = {"cached": [], "from_disk": [], "copied": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "a", 1, LARGE)
        with EngineServer("sglang", model, folder) as seed:
            seed.wait_up()
            peer = "--remote-instance-weight-loader-"
            place = ["--load-format", "remote_instance", f"{peer}seed-instance-ip", "127.0.0.1"]
            place += [f"{peer}seed-instance-service-port", str(seed.port), f"{peer}send-weights-group-ports"]
            for _ in range(ROUNDS):
                found["copied"].append(loaded_s(model, folder, [*place, f"[{free_port()}]"]))
                forget(model)
                found["from_disk"].append(loaded_s(model, folder, ()))
                found["cached"].append(loaded_s(model, folder, ()))
        nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    result = {
        "gigabytes": round(nbytes / 1e9, 2),
        **{name: median(times) for name, times in found.items()},
        "all": found,
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
