"""pytest plugin: `pytest --replay-log DIR` makes two tests of every recorded run below a folder.

    replay   every decision comes out as it was recorded
    verify   the file is whole, and what must hold in every run held in this one

A test of one's own that takes the fixture `run_log` runs once for each of them:

    def test_nobody_failed(run_log):
        assert not any(report.failed for report in run_log.reports.values())

`run_log` is a `controlplane.cli.recorded.RecordedRun`. Nothing of ours is imported before the option is used: every
pytest that runs where we are installed loads this file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from controlplane.cli.recorded import RecordedRun

_FOUND = pytest.StashKey[list[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--replay-log`, as often as you like."""
    group = parser.getgroup("rolloutctl", "recorded runs of rolloutctl")
    text = "Replay and verify the recorded runs at PATH, a log or a folder of logs."
    group.addoption("--replay-log", action="append", default=[], metavar="PATH", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Look for the logs before anything is collected, so that a wrong path is said at once."""
    places = config.getoption("--replay-log")
    config.stash[_FOUND] = []
    if places:
        from controlplane.cli.recorded import find_logs
        from schemas.errors import ConfigError

        try:
            config.stash[_FOUND] = [path for place in places for path in find_logs(Path(place))]
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two tests for each log, after all others."""
    items.extend(
        RecordedRunItem.from_parent(session, name=f"{check}[{path.name}]", log=path, check=check)
        for path in config.stash[_FOUND]
        for check in ("replay", "verify")
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `run_log` runs for each log."""
    if "run_log" in metafunc.fixturenames:
        found = metafunc.config.stash[_FOUND]
        metafunc.parametrize("run_log", found, indirect=True, ids=[path.name for path in found])


@pytest.fixture
def run_log(request: pytest.FixtureRequest) -> "RecordedRun":
    """A recorded run, parsed; see `controlplane.cli.recorded.RecordedRun`."""
    from controlplane.cli.recorded import RecordedRun

    return RecordedRun(request.param)


class Differs(Exception):
    """What is wrong with a log, in words for people."""


class RecordedRunItem(pytest.Item):
    """One check of one log."""

    def __init__(self, *, log: Path, check: str, **options: Any) -> None:
        super().__init__(**options)
        self._log, self._check = log, check

    def runtest(self) -> None:
        """Raise Differs when something is wrong."""
        if wrong := "\n".join(self._replay() if self._check == "replay" else self._verify()):
            raise Differs(wrong)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The difference, without a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, Differs) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """The log, as the place of the test."""
        return self._log, None, self.name

    def _replay(self) -> Iterator[str]:
        from controlplane.cli.reducers import replay_file
        from schemas.errors import RolloutctlError

        try:
            replay_file(self._log)
        except RolloutctlError as error:
            yield str(error)

    def _verify(self) -> Iterator[str]:
        from controlplane.record.invariants import verify
        from controlplane.record.log import RunLog
        from schemas.errors import RolloutctlError

        try:
            yield from map(str, verify(RunLog.read(self._log)))
        except RolloutctlError as error:
            yield str(error)
