# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.rpc.api's names: the functions of `muster.rpc`."""

from . import RRef, get_worker_info, remote, rpc_async, rpc_sync, shutdown

__all__ = ["RRef", "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"]
