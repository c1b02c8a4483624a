"""Our own log: structured lines on stderr, quiet where a person watches progress instead."""

from __future__ import annotations

import enum
import functools
import logging
import sys


class Level(enum.StrEnum):
    """What is logged at least."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Format(enum.StrEnum):
    """How a line is written."""

    LOGFMT = "logfmt"
    JSON = "json"


_chosen: dict[str, Level | Format | None] = {"level": None, "format": None}


def choose(level: Level | None, form: Format | None) -> None:
    """Remember what the command line asks for, until a command that logs configures it."""
    _chosen.update(level=level, format=form)


def configure(default: Level = Level.WARNING) -> None:
    """Send the log to stderr; `default` holds when the command line did not name a level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    # of other packages only what is wrong
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("orchestrator").setLevel(str(_chosen["level"] or default).upper())


class _Lines(logging.Formatter):
    """structlog's formatter, made for the first line: where there is none, it need not be imported."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line."""
        return self._theirs.format(record)

    @functools.cached_property
    def _theirs(self) -> logging.Formatter:
        return _formatter()


def _formatter() -> logging.Formatter:
    import structlog

    renderer: structlog.typing.Processor = structlog.processors.LogfmtRenderer(
        key_order=["timestamp", "level", "event", "profile"], drop_missing=True, bool_as_flag=False
    )
    if _chosen["format"] is Format.JSON:
        renderer = structlog.processors.JSONRenderer(default=str)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.ExtraAdder(),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
