# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.state_dict's names for models and optimizers, sharded or not: whole
states or this rank's shards, and the way back. They are those of `muster.fsdp`.

`muster.checkpoint.save` needs none of them: it takes modules and optimizers themselves, each rank's
shards as they are.
"""

from torch.distributed.checkpoint.state_dict import (  # what states are made of
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    ValueType,
)

from muster.fsdp import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
