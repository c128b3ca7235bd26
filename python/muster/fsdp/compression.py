# SPDX-License-Identifier: BSD-3-Clause
"""Gradients and parameters of sharded models that travel in fewer bits."""

from . import units

_NAMES = (None, "bf16", "int8", "int4")


def set_compression(model, *, gradients=None, parameters=None):
    """How values travel in all units of `model`, which are there already: gradients when they are
    averaged, parameters when a pass gathers them. Each is "bf16", "int8", "int4" or None, with the
    errors of muster.quantized; for float32, float16 and bfloat16. Shards are never rounded, and
    neither is what state dicts gather. All ranks give the same, between passes. A hook or a custom
    collective of a unit is called in place of both.
    """
    for name in (gradients, parameters):
        if name not in _NAMES:
            units.refuse(
                f"set_compression: there is no compression {name!r}; give 'bf16', 'int8', 'int4' "
                "or None"
            )
    of = units.units_in(model)
    if not of:
        units.refuse(
            f"set_compression: {type(model).__name__} has no unit; shard the model before, by "
            "FullyShardedDataParallel or fully_shard"
        )
    for unit in of:
        unit.set_compression(gradients, parameters)
