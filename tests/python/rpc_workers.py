# SPDX-License-Identifier: BSD-3-Clause
"""Workers of RPC as forked processes of a test."""

from ranks import LIMIT_S, meeting_file, run_ranks

import muster as dist


def _worker(rank, where, names, body, arguments, options):
    rpc = dist.rpc
    rpc.init_rpc(
        names[rank],
        rank=rank,
        world_size=len(names),
        rpc_backend_options=rpc.RpcBackendOptions(init_method=where, **options),
    )
    try:
        result = body(rank, *arguments)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    if rpc.is_initialized():
        rpc.shutdown(timeout=LIMIT_S)
    return result


def on_workers(names, body, *arguments, killed=(), **options):
    """`body(rank, *arguments)` between init_rpc and shutdown; names: a list, or how many "worker0",
    "worker1", ...
    """
    names = [f"worker{rank}" for rank in range(names)] if isinstance(names, int) else names
    return run_ranks(
        len(names),
        _worker,
        "file://" + meeting_file(),
        names,
        body,
        arguments,
        options,
        killed=killed,
    )
