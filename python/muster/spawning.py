# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as processes or threads of this program."""

from collections.abc import Callable
from typing import Any

from . import _C


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    threads: bool = False,
) -> Any:
    """Runs `fn(i, *args)` for i in 0 .. nprocs - 1; the first failure ends the others and is raised
    with its rank and text.

    In processes it is torch.multiprocessing.spawn, with its errors and its context where `join` is
    false. With `threads` the ranks are threads of this process, each with a default group of its
    own; `join` must be true.

    Raises: in processes torch.multiprocessing.ProcessRaisedException (with the rank's traceback) or
    ProcessExitedException; with `threads` SpawnError, whose `ranks` are those at fault,
    KeyboardInterrupt after Ctrl-C, and ValueError where `join` is false.
    """
    if not threads:
        import torch.multiprocessing

        return torch.multiprocessing.start_processes(fn, args, nprocs, join, daemon, start_method)
    if not join:
        raise ValueError(
            "spawn: ranks that are threads cannot be left to themselves; give join=True"
        )
    _C.spawn_threads(fn, tuple(args), nprocs)
    return None
