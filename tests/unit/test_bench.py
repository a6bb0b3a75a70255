"""Each benchmark runs, with numbers that are too small to mean anything, and writes rows. It leaves no other file."""

import json
from pathlib import Path

import pytest

from bench.page import PAGES, Results, exchange_aims, filled
from tests.running import ROOT, python

SHORT = ("logs --commands 100", "machines --decisions 640 --agents 4")
LONG = (
    "adapters --sizes 1 --agents 2 --rounds 1",
    "agents --agents 2 --commands 2 --idle 0.1",
    "checkpoints --sizes 1 --rounds 1",
    "fanout --agents 2 --rounds 2 --systems rolloutctl-keys,pyzmq",
    "join --agents 2",
    "speakers --agents 2 --blocks 1 --idle 0.1 --uploads",
    "trainer --agents 2 --real 2 --loops python --seconds 0.2 --commands 100 --latencies 2",
    "weights --agents 2 --rounds 2 --load-ms 1",
)


@pytest.mark.parametrize("words", [*SHORT, *(pytest.param(words, marks=pytest.mark.long) for words in LONG)])
def test_a_benchmark_runs(words: str, tmp_path: Path) -> None:
    name, *options = words.split()
    out, temporary = tmp_path / "rows.json", tmp_path / "temporary"
    temporary.mkdir()
    ran = python("-m", f"bench.{name}", *options, "--out", out, cwd=ROOT, env={"TMPDIR": str(temporary)})
    assert ran.returncode == 0, ran.stderr
    assert json.loads(out.read_text())
    assert list(temporary.iterdir()) == []


def test_every_table_of_the_pages_is_one_that_can_be_written() -> None:
    for page in PAGES:
        filled((ROOT / page).read_text(), Results(none=[]))


def test_results_are_written_between_their_marks_and_nowhere_else() -> None:
    page = "a\n<!-- figures: growth -->\nold\n<!-- end of figures -->\nb\n"
    assert filled(page, Results()) == page
    written = filled(page, Results(machines=[{"what": "hello", "agents": 64, "us": 2.41}]))
    assert written.startswith("a\n<!-- figures: growth -->\n| µs of CPU | 64 |\n")
    assert written.endswith("| hello | 2.4 |\n<!-- end of figures -->\nb\n")


def test_an_aim_is_reached_missed_or_not_measured() -> None:
    measured = Results(fanout=[{"system": "rolloutctl", "agents": 1, "x_pyzmq": 5.01, "x_http": 0.5}])
    reached = {aim.what: aim.cells(measured)[-1] for aim in exchange_aims()}
    assert reached["engines called, 1 agents, against bare pyzmq"] == "**no**"
    assert reached["engines called, 1 agents, faster than HTTP"] == "yes"
    assert reached["engines called, 8 agents, against bare pyzmq"] == "not measured"
