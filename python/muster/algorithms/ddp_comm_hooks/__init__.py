# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.algorithms.ddp_comm_hooks' names: what happens to a bucket of gradients between
backward and the optimizer.

`model.register_comm_hook(state, hook)`: hooks of these modules run in C++. One of your own is any
callable `hook(state, bucket)` that starts the communication of a bucket and returns what `wait()`
of gives the tensor for the optimizer: a `torch.futures.Future`, or `lazily(f)`.
"""

import enum
import functools

from . import (
    ddp_zero_hook,  # noqa: F401
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,  # noqa: F401
    post_localSGD_hook,  # noqa: F401
    powerSGD_hook,
    quantization_hooks,
)
from .lazily import Lazily, lazily  # noqa: F401

__all__ = ["DDPCommHookType", "Lazily", "lazily", "register_ddp_comm_hook"]


class DDPCommHookType(enum.Enum):
    """Hooks by name, for `register_ddp_comm_hook`: a function of a state and a bucket each."""

    ALLREDUCE = functools.partial(default_hooks.allreduce_hook)
    FP16_COMPRESS = functools.partial(default_hooks.fp16_compress_hook)
    BF16_COMPRESS = functools.partial(default_hooks.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = functools.partial(quantization_hooks.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = functools.partial(quantization_hooks.quantization_perchannel_hook)
    POWER_SGD = functools.partial(powerSGD_hook.powerSGD_hook)
    POWER_SGD_RANK2 = functools.partial(powerSGD_hook.powerSGD_hook)
    BATCHED_POWER_SGD = functools.partial(powerSGD_hook.batched_powerSGD_hook)
    BATCHED_POWER_SGD_RANK2 = functools.partial(powerSGD_hook.batched_powerSGD_hook)
    NOOP = functools.partial(debugging_hooks.noop_hook)


_RANKS_OF_POWER_SGD = {
    DDPCommHookType.POWER_SGD: 1,
    DDPCommHookType.POWER_SGD_RANK2: 2,
    DDPCommHookType.BATCHED_POWER_SGD: 1,
    DDPCommHookType.BATCHED_POWER_SGD_RANK2: 2,
}


def register_ddp_comm_hook(comm_hook_type, model, state=None):
    """`model.register_comm_hook` with the hook of that DDPCommHookType. state: the group to average
    over; None: the model's own. Raises ValueError (DistArgumentError) for a second hook.
    """
    rank = _RANKS_OF_POWER_SGD.get(comm_hook_type)
    if rank is not None:
        state = powerSGD_hook.PowerSGDState(state, matrix_approximation_rank=rank)
    model.register_comm_hook(state, comm_hook_type.value.func)
