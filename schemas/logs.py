"""Loggers whose lines can't be forged: what engines, hosts, paths and peers say is made harmless first."""

import datetime
import json
import logging
import sys
import time
from typing import Final, Literal

from schemas.formatting import printable

LogFormat = Literal["text", "json"]
MESSAGE_MAX: Final = 16_000
"""Characters of a message; what is longer is cut."""


def logger_of(name: str) -> logging.Logger:
    """Return the logger `rolloutctl.<name>`. Its messages are printable, and their further lines are indented."""
    logger = logging.getLogger(f"rolloutctl.{name}")
    if _make_printable not in logger.filters:
        logger.addFilter(_make_printable)
    return logger


def log_to_stderr(level: int, kind: LogFormat = "text") -> None:
    """Write the log to stderr: our lines from a level on, and warnings of all others.

    Args:
        level: Of `logging`.
        kind: `text`, lines that begin with the time and its zone; or `json`, one object in each line, with `time`,
            `level`, `logger` and `message`, and `error` where there is a traceback.
    """
    handler = _Stderr()
    handler.setFormatter(
        _JsonFormatter() if kind == "json" else _TextFormatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rolloutctl").setLevel(level)


def time_with_zone(seconds: float) -> str:
    """Return a wall clock's time as text, in the zone of this machine: `2026-11-23T09:41:07.120+01:00`."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


class _Stderr(logging.Handler):
    """Writes to what is stderr at that moment: while a progress bar is shown, that prints above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _TextFormatter(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time_with_zone(record.created)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time_with_zone(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RateLimit(logging.Filter):
    """Lets a few messages of each kind through in an interval, and says with the next one how many it left out.

    A kind is what one place in the code logs, so that a flood of one hides no other.
    """

    def __init__(self, lines: int = 20, interval_s: float = 10.0) -> None:
        super().__init__()
        self._lines, self._interval_s = lines, interval_s
        self._began_s = 0.0
        self._counts: dict[tuple[str, int], int] = {}
        self._before = self._counts

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, kind = time.monotonic(), (record.pathname, record.lineno)
        if now_s - self._began_s >= self._interval_s:
            self._began_s, self._counts, self._before = now_s, {}, self._counts
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1 and (left_out := self._before.get(kind, 0) - self._lines) > 0:
            record.msg, record.args = f"{record.getMessage()} ({left_out} such lines before it were left out)", ()
        return count <= self._lines


def _make_printable(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if len(text) > MESSAGE_MAX:
        text = f"{text[:MESSAGE_MAX]}… ({len(text):,} characters)"
        record.msg, record.args = text, ()
    if not text.isprintable():
        record.msg, record.args = printable(text).replace("\n", "\n  "), ()
    return True
