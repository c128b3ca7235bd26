# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.algorithms' names: uneven inputs (`join`), communication hooks
(`ddp_comm_hooks`) and averages of parameters (`model_averaging`).
"""

from . import model_averaging  # noqa: F401
from .join import Join, Joinable, JoinHook  # noqa: F401
