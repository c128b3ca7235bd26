"""FullyShardedDataParallel and fully_shard, under torch.distributed.fsdp's names: parameters, gradients and optimizer state divided among the
ranks."""

from . import wrap
from .fully_shard import FSDPModule, fully_shard, register_fsdp_forward_method
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .gradients import clip_grad_norm_
from .model_state import StateDictOptions, get_model_state_dict, set_model_state_dict
from .options import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from .sharded_grad_scaler import ShardedGradScaler

FSDP = FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "FSDP",
    "fully_shard",
    "FSDPModule",
    "ShardingStrategy",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "BackwardPrefetch",
    "CPUOffload",
    "OffloadPolicy",
    "StateDictType",
    "StateDictOptions",
    "FullStateDictConfig",
    "FullOptimStateDictConfig",
    "ShardedStateDictConfig",
    "clip_grad_norm_",
    "get_model_state_dict",
    "set_model_state_dict",
    "register_fsdp_forward_method",
    "ShardedGradScaler",
    "wrap",
]
