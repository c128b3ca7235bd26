# SPDX-License-Identifier: BSD-3-Clause
"""Options of FullyShardedDataParallel and fully_shard, under torch.distributed.fsdp's names.
Torch's own objects will do as well.
"""

import dataclasses
import enum

import torch

from muster.nn import parallel


class ShardingStrategy(enum.Enum):
    """FULL_SHARD: whole parameters are given back between forward and backward. SHARD_GRAD_OP: they
    stay until backward, which saves gathering them again. NO_SHARD: every rank keeps everything,
    and gradients are averaged. HYBRID_SHARD, _HYBRID_SHARD_ZERO2: FULL_SHARD and SHARD_GRAD_OP
    within groups of ranks that hold the same shards.
    """

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


class BackwardPrefetch(enum.Enum):
    """When the unit that backward needs next begins to be gathered: before the current unit's
    computation, or after it.
    """

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


@dataclasses.dataclass
class CPUOffload:
    """offload_params=True: shards, their gradients and so the optimizer's state are on the CPU;
    whole parameters are on the module's device.
    """

    offload_params: bool = False


@dataclasses.dataclass
class MixedPrecision:
    """Forward and backward in a narrower type than the one that shards are kept and updated in.
    A type of None casts nothing; only floating-point tensors are cast.
    """

    param_dtype: torch.dtype | None = None  #: of whole parameters, and of forward's inputs
    reduce_dtype: torch.dtype | None = None  #: what gradients travel as; None: param_dtype
    buffer_dtype: torch.dtype | None = None  #: of buffers, from the construction on
    keep_low_precision_grads: bool = (
        False  #: taken for torch's sake: gradients are in the shards' type
    )
    cast_forward_inputs: bool = False  #: tensors that any unit is given become param_dtype
    cast_root_forward_inputs: bool = True  #: those that the outermost unit is given do


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The same for `fully_shard`."""

    param_dtype: torch.dtype | None = None  #: of whole parameters, and of forward's inputs
    reduce_dtype: torch.dtype | None = None  #: what gradients travel as; None: the parameters' own
    output_dtype: torch.dtype | None = None  #: of the floating-point tensors that forward returns
    cast_forward_inputs: bool = True  #: tensors that forward is given become param_dtype


class StateDictType(enum.Enum):
    """The form of `state_dict`. FULL_STATE_DICT: whole parameters. SHARDED_STATE_DICT,
    LOCAL_STATE_DICT: this rank's shards.
    """

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


@dataclasses.dataclass
class StateDictConfig:
    """The form of parameters in a state_dict."""

    offload_to_cpu: bool = False  #: on the CPU


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    """The form of whole parameters."""

    rank0_only: bool = False  #: on the group's rank 0; the others get an empty dictionary


@dataclasses.dataclass
class LocalStateDictConfig(StateDictConfig):
    """The form of this rank's shards."""


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    """The form of shards; on the CPU as copies."""

    _use_dtensor: bool = False  #: taken for torch's sake: shards are plain tensors


@dataclasses.dataclass
class OptimStateDictConfig:
    """The form of an optimizer's state."""

    offload_to_cpu: bool = True  #: on the CPU


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The form of an optimizer's whole state."""

    rank0_only: bool = False  #: on the group's rank 0; the others get an empty one


@dataclasses.dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The form of the state of this rank's shards."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """The form of the state of shards."""

    _use_dtensor: bool = False  #: taken for torch's sake: shards are plain tensors


@dataclasses.dataclass
class StateDictSettings:
    """The arguments of `set_state_dict_type`."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(enum.Enum):
    """By what an optimizer's state names parameters."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


@dataclasses.dataclass
class OffloadPolicy:
    """Parameters stay where they are."""


@dataclasses.dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state are on the CPU; whole parameters are on
    the module's device.
    """

    pin_memory: bool = True  #: page-locked memory, where the device is a GPU


@dataclasses.dataclass
class DataParallelMeshDims:
    """Which dimensions of a mesh `fully_shard` uses: names, or tuples of names that count as one.
    At least one of the two.
    """

    shard: str | tuple[str, ...] | None = None  #: its ranks share the parameters
    replicate: str | tuple[str, ...] | None = None  #: its ranks hold the same

    def __post_init__(self):
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: shard or replicate must be given")

    @property
    def shard_names(self):
        """A tuple of names."""
        return _as_tuple(self.shard)

    @property
    def replicate_names(self):
        """A tuple of names."""
        return _as_tuple(self.replicate)


def _as_tuple(names):
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def native(precision):
    """The unit's options that `precision` stands for: an object with MixedPrecision's or
    MixedPrecisionPolicy's fields, or None.
    """
    if precision is None:
        return {}
    mine = parallel.MixedPrecision(
        precision.param_dtype,
        precision.reduce_dtype,
        getattr(precision, "buffer_dtype", None),
        cast_forward_inputs=precision.cast_forward_inputs,
    )
    return {
        "mixed_precision": mine,
        "cast_root_forward_inputs": getattr(precision, "cast_root_forward_inputs", False),
        "reduce_in_own_dtype": not hasattr(precision, "buffer_dtype"),
    }
