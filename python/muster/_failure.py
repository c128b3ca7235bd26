# SPDX-License-Identifier: BSD-3-Clause
"""Tells the other ranks why this process fails: the exception, with its type, text and place.

Importing muster chains `sys.excepthook` and `threading.excepthook`, and adds an exit handler to
this process and to the children that multiprocessing makes of it. A process without an open group
sends nothing.
"""

import atexit
import multiprocessing.util
import os
import sys
import threading

import torch

from . import _C

_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__)
)
_MOST_TEXT = 300


def _absolute(file):
    try:
        return os.path.abspath(file)
    except OSError:  # the working directory is gone
        return file


def _place(error):
    """The place in the user's code that raised it: "train.py:33"."""
    place = outside = None
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        place = f"{os.path.basename(file)}:{trace.tb_lineno}"
        if not file.startswith("<frozen") and not _absolute(file).startswith(_PACKAGES):
            outside = place
        trace = trace.tb_next
    return outside or place


def describe(error):
    """In a line: "ValueError: bad batch (train.py:33)"."""
    try:
        text = str(error)
    except Exception:
        text = ""
    lines = text.strip().splitlines()
    line = lines[0] if lines else ""
    if len(line) > _MOST_TEXT:
        line = line[:_MOST_TEXT] + "..."
    place = _place(error)
    return type(error).__name__ + (f": {line}" if line else "") + (f" ({place})" if place else "")


def earlier(error):
    """The ranks whose failure led to this one."""
    return list(error.ranks) if isinstance(error, _C.DistError) else []


def _interactive():
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _others_run():
    """Whether the process goes on when its main thread has ended."""
    return any(
        not thread.daemon and thread is not threading.main_thread()
        for thread in threading.enumerate()
    )


def _last():
    """The exception that ended the program, as the interpreter has noted it; None before."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _chain_excepthook():
    before = sys.excepthook

    def hook(kind, error, trace):
        # Programs that show an exception by this hook and go on have not ended by it.
        if error is _last() and not _interactive():
            try:
                _C.note_failure(describe(error), earlier(error))
                if threading.current_thread() is threading.main_thread() and not _others_run():
                    _C.tell_failure()
            except Exception:
                pass  # the exception itself is still to be shown
        before(kind, error, trace)

    sys.excepthook = hook
    return hook


def _chain_threading_excepthook():
    before = threading.excepthook

    def hook(args):
        try:
            if args.exc_value is not None:
                name = args.thread.name if args.thread is not None else "unknown"
                _C.note_trouble(f"{describe(args.exc_value)}, in its thread {name}")
        except Exception:
            pass  # the exception itself is still to be shown
        before(args)

    threading.excepthook = hook


def _at_exit():
    error = _last()
    if sys.excepthook is not _hook and error is not None and not _interactive():
        # Another hook took the place of ours. A program that ends well may have left an error in
        # sys.last_exc, to be debugged: that is no failure.
        _C.note_exception(describe(error), earlier(error))
    _C.tell_failure()


def _is_good_end(error):
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def _at_end_of_child():
    """multiprocessing catches what ends a child; here it is still under way."""
    error = sys.exc_info()[1]
    if _is_good_end(error):
        return
    if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
        error = (
            error.__context__
        )  # as torch.multiprocessing.spawn leaves, after it has noted the exception
    if isinstance(error, SystemExit):
        status = (
            f"its process ended with exit status {error.code}"
            " and had not called destroy_process_group"
        )
        _C.note_failure(status, [])
    else:
        _C.note_failure(describe(error), earlier(error))
    _C.tell_failure()


def _at_good_end_of_child():
    """The destructors of a child that multiprocessing has forked do not run: the others would take
    its end for a death. Last of all, for other finalizers may still use the groups.
    """
    ends_by_os_exit = (
        multiprocessing.parent_process() is not None
        and multiprocessing.get_start_method() != "spawn"
    )
    if ends_by_os_exit and _is_good_end(sys.exc_info()[1]) and not _others_run():
        _C.leave_groups()


def _follow_children(_=None):
    multiprocessing.util.Finalize(None, _at_end_of_child, exitpriority=100)
    multiprocessing.util.Finalize(None, _at_good_end_of_child, exitpriority=-100)


_hook = _chain_excepthook()
_chain_threading_excepthook()
atexit.register(_at_exit)
_follow_children()
multiprocessing.util.register_after_fork(_hook, _follow_children)
