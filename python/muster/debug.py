# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.debug's functions: a page that shows the ranks of this job (docs/user/dash.md).

Rank 0 starts `muster dash`. Every rank that calls `start_debug_server` lets the page ask it for the
stacks of its Python threads.
"""

import faulthandler
import fcntl
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from typing import Any, Literal

from ._lookups import get_rank, is_initialized

__all__ = ["start_debug_server", "stop_debug_server"]

_STACKS_SIGNAL = (
    signal.SIGRTMIN + 7
)  # src/faces/cli/dash/stacks.cc has the same, and the name below
_LONGEST_WAIT_S = 5.0  # of the page for a rank that does not answer
_LONGEST_END_S = 5.0  # of the page, before it is killed
_LOCK = threading.Lock()
_started = False
_stacks: int | None = None  # a memory file
_dash: subprocess.Popen[str] | None = None


def start_debug_server(
    port: int = 25999,
    worker_port: int = 0,
    start_method: Literal["fork", "spawn", "forkserver"] | None = None,
    dump_dir: str | None = None,
    dump_interval: float = 60.0,
    enabled_dumps: set[str] | None = None,
    handlers: list[Any] | None = None,
    fetch_timeout: float = 60.0,
) -> None:
    """Serves the page of `muster dash` at this port of rank 0's loopback interface (0: a free one),
    and prints its address, which has a token, on standard error. Every rank calls it, after
    `init_process_group`. The page ends with `stop_debug_server` or with rank 0's process.

    Ranks need no server of their own, and the page is a program of its own: `worker_port`,
    `start_method`, `dump_interval` and `enabled_dumps` change nothing. `dump_dir` and `handlers`
    raise NotImplementedError. Ranks of other hosts that do not answer are waited for at most
    `fetch_timeout`, and no longer than 5 s.
    """
    _check(start_method, dump_dir, handlers, fetch_timeout)
    global _started, _dash
    with _LOCK:
        if _started:
            raise AssertionError("debug server already started")
        if not is_initialized():
            raise RuntimeError(
                "start_debug_server: this process is in no job yet; call init_process_group before"
            )
        _answer_for_stacks()
        try:
            if get_rank() == 0:
                _dash = _start_dash(port, min(fetch_timeout, _LONGEST_WAIT_S))
        except BaseException:
            _leave_stacks()
            raise
        _started = True


def stop_debug_server() -> None:
    """Ends the page, on rank 0, and the answers for stacks. AssertionError if it is not started."""
    global _started, _dash
    with _LOCK:
        if not _started:
            raise AssertionError("debug server is not started")
        _started = False
        _leave_stacks()
        if _dash is not None:
            _dash.terminate()
            try:
                _dash.wait(_LONGEST_END_S)
            except subprocess.TimeoutExpired:  # it has been stopped
                _dash.kill()
                _dash.wait()
            for stream in (_dash.stdin, _dash.stdout):
                if stream is not None:
                    stream.close()
            _dash = None


def _check(
    start_method: str | None, dump_dir: str | None, handlers: list[Any] | None, fetch_timeout: float
) -> None:
    if start_method not in (None, "fork", "spawn", "forkserver"):
        raise ValueError(f"start_debug_server: cannot find context for {start_method!r}")
    if dump_dir is not None:
        raise NotImplementedError(
            "start_debug_server: dump_dir is not supported; `muster trace -o FILE` writes what the "
            "page shows"
        )
    if handlers is not None:
        raise NotImplementedError(
            "start_debug_server: handlers are parts of torch's page; muster's has its own"
        )
    if not fetch_timeout > 0:
        raise ValueError(f"start_debug_server: fetch_timeout must be above 0, not {fetch_timeout}")


def _job() -> list[str]:
    """How `muster dash` finds this job: by the files of this host, or, if there are ranks on other
    hosts, through the store.
    """
    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if here == everywhere or here is None or everywhere is None:
        return ["--pid", str(os.getpid())]
    store = os.environ.get("MUSTER_AGENT_STORE") or f"{address}:{port}"
    return ["--store", store]


def _start_dash(port: int, wait_s: float) -> subprocess.Popen[str]:
    from . import run

    job = _job()
    if job[0] == "--store":
        job += ["--wait", str(max(wait_s, 0.1))]
    # It ends when its standard input does, so also with a process that is killed.
    dash = subprocess.Popen(
        [run.command(), "dash", "--port", str(port), "--until-eof", *job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert dash.stdout is not None
    address = dash.stdout.readline()
    if not address:
        dash.communicate()
        raise RuntimeError(
            f"start_debug_server: muster dash could not serve a page at port {port}; what it said "
            "stands above"
        )
    print(address, end="", file=sys.stderr, flush=True)
    return dash


def _answer_for_stacks() -> None:
    """From now on the page can ask this process for its stacks. The file is found by its name among
    the process's descriptors, and goes with the process.
    """
    global _stacks
    if _is_in_use(_STACKS_SIGNAL):
        print(
            f"start_debug_server: signal {int(_STACKS_SIGNAL)} is in use here, so the page has no "
            "stacks of Python without py-spy",
            file=sys.stderr,
        )
        return
    # The page asks by the signal if it finds a handler. One that goes meanwhile must leave no
    # default, which would end this process. Only the main thread may say so.
    if threading.current_thread() is threading.main_thread():
        signal.signal(_STACKS_SIGNAL, signal.SIG_IGN)
    _stacks = os.memfd_create("muster-stacks", os.MFD_CLOEXEC)
    # The page cuts the file before it is large.
    fcntl.fcntl(_stacks, fcntl.F_SETFL, fcntl.fcntl(_stacks, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(_STACKS_SIGNAL, file=_stacks, all_threads=True, chain=False)


def _is_in_use(number: int) -> bool:
    """Whether Python, or a library that it knows nothing of, has a handler."""
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return True
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.M)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _leave_stacks() -> None:
    global _stacks
    if _stacks is None:
        return
    faulthandler.unregister(_STACKS_SIGNAL)
    os.close(_stacks)
    _stacks = None
