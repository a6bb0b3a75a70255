"""What also works where Linux's own calls are missing: everything but `--launch`, which says so."""

import subprocess
import sys


def test_without_linux_everything_works_but_launch() -> None:
    command = [sys.executable, "-m", "tests.processes.without_linux"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    modules, report, launch = ended.stdout.splitlines()
    assert int(modules.split()[0]) > 200
    assert report.startswith("flush (seq 2): 1 acted")
    assert launch == (
        "the server: only Linux can end everything that a server started. Start it yourself, and leave --launch out."
    )
