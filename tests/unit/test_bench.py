"""Each benchmark runs, with numbers that are too small to mean anything, and writes rows. It leaves no other file."""

import json
from pathlib import Path

import pytest

from bench.aims import aims
from bench.page import PAGES, bus_alone, filled
from bench.slowdowns import interval
from tests.running import ROOT, python


@pytest.mark.parametrize(
    "words",
    [
        "agents --agents 2 --commands 2 --idle 0.1",
        "checkpoints --sizes 1 --rounds 1",
        "fanout --agents 2 --rounds 2 --systems rolloutctl-keys,floor,pyzmq",
        "join --agents 2",
        "logs --commands 100",
        "machines --decisions 640 --agents 4",
        "parts --agents 2 --seconds 0.2",
        "speakers --agents 2 --blocks 1 --idle 0.1 --uploads",
        "trainer --agents 2 --real 2 --loops python --block 0.1 --pairs 2 --commands 100 --latencies 2",
        "weights --agents 2 --rounds 2 --load-ms 1",
    ],
)
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
        filled((ROOT / page).read_text(), {"none": []})


def test_results_are_written_between_their_marks_and_nowhere_else() -> None:
    page = "a\n<!-- figures: parts -->\nold\n<!-- end of figures -->\nb\n"
    assert filled(page, {}) == page
    written = filled(page, {"parts": [{"who": "bus", "agents": 8, "part": "decide", "percent": 12.4}]})
    assert written.startswith("a\n<!-- figures: parts -->\n| part | bus, N=8 |\n")
    assert written.endswith("| decide | 12 % |\n<!-- end of figures -->\nb\n")


def test_a_row_of_the_bus_alone_has_a_cell_for_each_head() -> None:
    names = ["bus_own_us", "bus_zmq_us", "bare_own_us", "bare_zmq_us", "x_bare", "bus_median_us", "idle_share"]
    names += ["turn_us", "join_turn_us", "idle_turn_us", "idle_zmq_share", "joined_s"]
    heads, line, row = bus_alone([dict.fromkeys(names, 1.0) | {"agents": 1, "burst": 1, "burst_cpu": 1}]).split("\n")
    assert heads.count("|") == line.count("|") == row.count("|")


def test_an_aim_is_reached_missed_or_not_measured() -> None:
    measured = {"fanout": [{"system": "rolloutctl", "agents": 1, "x_pyzmq": 4.01, "x_http": 0.5}]}
    holds = {aim.what: aim.holds for aim in aims(measured)}
    assert holds["engines called, 1 agents, against bare pyzmq"] is False
    assert holds["engines called, 1 agents, faster than HTTP"] is True
    assert holds["engines called, 8 agents, against bare pyzmq"] is None


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    """Those for the sign test: the 6th and 15th of 20, the 2nd and 9th of 10, all of 5."""
    assert interval([float(number) for number in range(1, 21)]) == (6, 15)
    assert interval([float(number) for number in range(1, 11)]) == (2, 9)
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (1, 5)
