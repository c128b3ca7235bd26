# SPDX-License-Identifier: BSD-3-Clause
"""The log of muster's C++ half as records of Python's `logging`."""

import atexit
import logging
import os
import sys
import threading
import traceback

from . import _C

__all__ = ["to_logging", "to_stderr"]

_LEVELS = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG - 5,
}
_LOCK = threading.Lock()
_LONGEST_END_S = 2.0  # for handlers, when the interpreter ends
_thread: threading.Thread | None = None


def _hand_over(queue: int, logger: logging.Logger) -> None:
    complained = False
    while records := _C._take_log_records(queue):
        for level, rank, time, message in records:
            if not logger.isEnabledFor(_LEVELS[level]):
                continue
            record = logger.makeRecord(
                logger.name, _LEVELS[level], "muster", 0, message, (), None, extra={"rank": rank}
            )
            record.created, record.msecs = time, time % 1 * 1000
            try:
                logger.handle(record)
            except Exception:  # a filter's or a handler's: the next records are no worse for it
                if not complained:
                    print("muster.logs: a handler has raised; this is said once:", file=sys.stderr)
                    traceback.print_exc()
                complained = True


def to_logging(logger: logging.Logger | str = "muster") -> None:
    """From now on the log's lines are records of this logger instead of lines on standard error (or
    in MUSTER_LOG_FILE). A record's `rank` is None for lines of no rank. MUSTER_LOG_LEVEL says which
    lines there are, the logger's level and handlers what becomes of them. They run on a thread of
    their own, so a slow one holds up no call; the lines of a process that is killed may be lost. A
    forked child's lines go to standard error.
    """
    global _thread
    to_stderr()
    with _LOCK:
        target = logging.getLogger(logger) if isinstance(logger, str) else logger
        queue = _C._begin_log_queue()
        _thread = threading.Thread(
            target=_hand_over, args=(queue, target), name="muster log", daemon=True
        )
        _thread.start()


def to_stderr() -> None:
    """Ends `to_logging`: lines go where they went before."""
    global _thread
    with _LOCK:
        _C._end_log_queue()
        if _thread is not None and _thread is not threading.current_thread():
            _thread.join(_LONGEST_END_S)
        _thread = None


def _in_forked_child() -> None:
    global _LOCK, _thread
    _LOCK, _thread = threading.Lock(), None


atexit.register(to_stderr)
os.register_at_fork(after_in_child=_in_forked_child)
