"""`make` asks what installing torch would fetch, before it does: reads pip's report of a dry run from stdin.

Exits with 1 if that is a build with CUDA, and says how to choose. Needs the standard library only.
"""

import json
import re
import sys
from typing import Any

CUDA = re.compile(r"nvidia-|cuda-|triton$")


def cuda_packages(report: dict[str, Any]) -> list[str]:
    """Packages for NVIDIA GPUs that pip would install."""
    names = (str(item["metadata"]["name"]).lower() for item in report["install"])
    return sorted(name for name in names if CUDA.match(name))


def main(wanted: str) -> None:
    text = sys.stdin.read()
    if not text.strip():
        sys.exit(f"pip could not find out what {wanted} needs, see above. Nothing was fetched.")
    found = cuda_packages(json.loads(text))
    if found:
        ways = {
            f"make demo TORCH={wanted}+cpu": "the CPU build, 200 MB; PIP_EXTRA_INDEX_URL must name PyTorch's",
            "": 'index of CPU builds, which its page "Get Started" has',
            "pip install uv && make demo": "the CPU build, from there; TORCH_BACKEND=auto for that of your GPU",
            f"make demo TORCH={wanted}": "this build, with all of that",
        }
        lines = (f"  {command:<36} {what}" for command, what in ways.items())
        what = f"{len(found)} packages for NVIDIA GPUs come with it, several gigabytes"
        head = f"{wanted} is a build with CUDA at your index: {what}.\nNothing was fetched. Choose:"
        sys.exit("\n".join([head, *lines]))


if __name__ == "__main__":
    main(sys.argv[1])
