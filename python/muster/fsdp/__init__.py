"""FullyShardedDataParallel and fully_shard, under torch.distributed.fsdp's names: parameters, gradients and optimizer state divided among the
ranks."""

from . import wrap
from .fully_shard import FSDPModule, fully_shard
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .options import (BackwardPrefetch, CPUOffload, FullStateDictConfig, MixedPrecision, MixedPrecisionPolicy, ShardedStateDictConfig,
                      ShardingStrategy, StateDictType)
from .model_state import StateDictOptions, get_model_state_dict, set_model_state_dict

FSDP = FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel", "FSDP", "fully_shard", "FSDPModule", "ShardingStrategy", "MixedPrecision", "MixedPrecisionPolicy",
           "BackwardPrefetch", "CPUOffload", "StateDictType", "StateDictOptions", "FullStateDictConfig", "ShardedStateDictConfig",
           "get_model_state_dict", "set_model_state_dict", "wrap"]
