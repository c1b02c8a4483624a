"""Our log: structlog's events on the standard library's loggers, so that an embedding program stays quiet.

A program that uses this package decides by `logging` what it sees of the logger ``orchestrator``; the
command line sets it up for itself. Event names are fixed words, everything else is a field. Keys, prompts
and answers are never logged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import structlog


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of one part, whose name starts with ``orchestrator``.

    Fields reach handlers as attributes of the record, so they can't be called like one of those
    (``name``, ``args``, ``module``, ``process``, ...).
    """
    return cast("structlog.stdlib.BoundLogger", _Later(name))


class _Later:
    """A logger that becomes structlog's with the first line that is wanted: importing that takes 50 ms."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger = logging.getLogger(name)
        self._bound: structlog.stdlib.BoundLogger | None = None

    def __getattr__(self, method: str) -> Any:
        level = logging.getLevelNamesMapping().get(method.upper())
        if self._bound is None and level is not None and not self._logger.isEnabledFor(level):
            return _unwanted
        if self._bound is None:
            self._bound = _bound(self._logger)
        return getattr(self._bound, method)


def _unwanted(*_: object, **__: object) -> None:
    """Log nothing."""


def _bound(logger: logging.Logger) -> structlog.stdlib.BoundLogger:
    import structlog

    bound: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logger,
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return bound
