"""Our log: structlog's events on the standard library's loggers, so that an embedding program stays quiet.

A program that uses this package decides by `logging` what it sees of the logger ``orchestrator``; the
command line sets it up for itself. Event names are fixed words, everything else is a field. Keys, prompts
and answers are never logged.
"""

from __future__ import annotations

import logging

import structlog


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of one part, whose name starts with ``orchestrator``.

    Fields reach handlers as attributes of the record, so they can't be called like one of those
    (``name``, ``args``, ``module``, ``process``, ...).
    """
    bound: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return bound
