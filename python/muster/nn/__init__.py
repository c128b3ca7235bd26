# SPDX-License-Identifier: BSD-3-Clause
"""torch.nn's names that train on several ranks: `muster.nn.parallel`; and torch.distributed.nn's:
collectives that gradients flow through (`muster.nn.functional`), and `RemoteModule`, a module that
lives on another worker.
"""

from . import functional, parallel  # noqa: F401
from .functional import *  # noqa: F403


def __getattr__(name):
    # It brings calls to other workers along, which few programs use.
    if name in ("RemoteModule", "api"):
        import importlib

        api = importlib.import_module(".api", __name__)
        return api if name == "api" else api.RemoteModule
    if name == "SyncBatchNorm":
        from .sync_batch_norm import SyncBatchNorm

        return SyncBatchNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
