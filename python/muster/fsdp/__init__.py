# SPDX-License-Identifier: BSD-3-Clause
"""FullyShardedDataParallel and fully_shard, under torch.distributed.fsdp's names: parameters,
gradients and optimizer state divided among the ranks.
"""

from . import api, wrap
from .api import *  # noqa: F403
from .compression import set_compression
from .fully_shard import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .gradients import clip_grad_norm_
from .model_state import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from .options import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateKeyType,
)
from .sharded_grad_scaler import ShardedGradScaler

FSDP = FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "FSDP",
    "fully_shard",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "OffloadPolicy",
    "StateDictOptions",
    "OptimStateKeyType",
    "clip_grad_norm_",
    "set_compression",
    "get_model_state_dict",
    "set_model_state_dict",
    "get_optimizer_state_dict",
    "set_optimizer_state_dict",
    "get_state_dict",
    "set_state_dict",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "UnshardHandle",
    "GradientReductionHandle",
    "ShardedGradScaler",
    "wrap",
]
__all__ += api.__all__
