"""Loggers whose lines can't be forged: what engines, hosts, paths and peers say is made harmless first."""

import logging

from schemas.formatting import printable


def logger_of(name: str) -> logging.Logger:
    """Return the logger `rolloutctl.<name>`. Its messages are printable, and their further lines are indented."""
    logger = logging.getLogger(f"rolloutctl.{name}")
    if _make_printable not in logger.filters:
        logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if not text.isprintable():
        record.msg, record.args = printable(text).replace("\n", "\n  "), ()
    return True
