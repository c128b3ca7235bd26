"""Ranks as processes or threads of this program."""

from . import _C


def spawn(fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn", *, threads=False):
    """Runs `fn(i, *args)` for i in 0 .. nprocs - 1; the first failure ends the others and is raised with its rank and text.

    In processes it is torch.multiprocessing.spawn, with its errors and its context where `join` is false. With `threads` the ranks are
    threads of this process, each with a default group of its own; a failure is SpawnError, and `join` must be true.
    """
    if not threads:
        import torch.multiprocessing

        return torch.multiprocessing.start_processes(fn, args, nprocs, join, daemon, start_method)
    if not join:
        raise ValueError("spawn: ranks that are threads cannot be left to themselves; give join=True")
    _C.spawn_threads(fn, tuple(args), nprocs)
    return None
