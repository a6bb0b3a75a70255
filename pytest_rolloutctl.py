"""pytest plugin: `pytest --replay-log DIR` runs two tests on every recorded run below a folder.

    replay   every decision is the same as recorded
    verify   the file is undamaged, and the invariants of every run hold

A test that uses the fixture `run_log` runs once for each of them:

    def test_no_agent_failed(run_log):
        assert not any(report.failed for report in run_log.reports.values())

`run_log` is a `controlplane.RecordedRun`. The fixture `fleet` starts a fleet for a test of a trainer
(docs/gamedays.md).

Every pytest run in an environment that has rolloutctl loads this file, also in repositories that never use it and have
packages named `schemas`, `workers` or `controlplane` of their own. So it is in none of ours, and imports them only when
the option is used.
"""

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from controlplane import RecordedRun
    from controlplane.staging import StagingFleet

_FOUND = pytest.StashKey[list[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--replay-log`, which is repeatable."""
    group = parser.getgroup("rolloutctl", "recorded runs of rolloutctl")
    text = "Replay and verify the recorded runs at PATH, a log or a folder of logs."
    group.addoption("--replay-log", action="append", default=[], metavar="PATH", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Find the logs before tests are collected, so that a wrong path fails at once."""
    places = config.getoption("--replay-log")
    config.stash[_FOUND] = []
    if places:
        _require_our_packages()
        from controlplane.replay.recorded_run import find_logs
        from schemas.errors import ConfigError

        try:
            config.stash[_FOUND] = [path for place in places for path in find_logs(Path(place))]
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from None


def _require_our_packages() -> None:
    try:
        from controlplane.shadowing import refuse_foreign
    except ImportError:
        found = find_spec("controlplane")
        place = found and (found.origin or list(found.submodule_search_locations or ()))
        text = f"--replay-log: `import controlplane` finds {place}, which is not rolloutctl's"
        raise pytest.UsageError(text) from None
    try:
        refuse_foreign()
    except ImportError as error:
        raise pytest.UsageError(f"--replay-log: {error}") from None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add two tests for each log, after all others."""
    items.extend(
        RecordedRunItem.from_parent(session, name=f"{check}[{path.name}]", log=path, check=check)
        for path in config.stash[_FOUND]
        for check in ("replay", "verify")
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses `run_log` once for each log."""
    if "run_log" in metafunc.fixturenames:
        found = metafunc.config.stash[_FOUND]
        metafunc.parametrize("run_log", found, indirect=True, ids=[path.name for path in found])


@pytest.fixture
def run_log(request: pytest.FixtureRequest) -> "RecordedRun":
    """A recorded run, decoded."""
    from controlplane import RecordedRun

    return RecordedRun(request.param)


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Callable[..., StagingFleet]]":
    """Start a small real fleet of tiny engines: `fleet(replicas=2, faults="...")`, which ends with the test."""
    from controlplane.staging import StagingFleet

    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(StagingFleet(tmp_path_factory.mktemp("fleet"), **options))


class RecordedRunFailed(Exception):
    """What is wrong with a log."""


class RecordedRunItem(pytest.Item):
    """One check of one log."""

    def __init__(self, *, log: Path, check: str, **options: Any) -> None:
        super().__init__(**options)
        self._log, self._check = log, check

    def runtest(self) -> None:
        """Raise RecordedRunFailed if something is wrong."""
        from controlplane.analysis.invariants import verify
        from controlplane.cli.replay_log import replay_file
        from controlplane.record.log import RunLog
        from schemas.errors import RolloutctlError

        try:
            if self._check == "replay":
                replay_file(self._log)
            elif violations := [str(violation) for violation in verify(RunLog.walk(self._log))]:
                raise RecordedRunFailed("\n".join(violations))
        except RolloutctlError as error:
            raise RecordedRunFailed(str(error)) from None

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The problems, without a traceback."""
        error = excinfo.value
        return str(error) if isinstance(error, RecordedRunFailed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """The location of the test: its log."""
        return self._log, None, self.name
