# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.rpc.constants' names: seconds, but for the number of threads."""

from .. import _C

_defaults = _C.RpcBackendOptions()

DEFAULT_INIT_METHOD = _defaults.init_method
DEFAULT_NUM_WORKER_THREADS = _defaults.num_worker_threads
DEFAULT_RPC_TIMEOUT_SEC = _defaults.rpc_timeout
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
UNSET_RPC_TIMEOUT = -1.0
