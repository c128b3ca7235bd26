"""torch.distributed.checkpoint.state_dict's names for models, sharded or not: whole states, and the
way back.

`muster.checkpoint.save` needs none of them: it takes modules and optimizers themselves, each rank's
shards as they are.
"""

from torch.distributed.checkpoint.state_dict import (  # what states are made of
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
)

from muster.fsdp import get_model_state_dict, set_model_state_dict

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "set_model_state_dict",
]
