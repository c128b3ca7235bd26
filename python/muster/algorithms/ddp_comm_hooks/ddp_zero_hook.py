# SPDX-License-Identifier: BSD-3-Clause
"""The step of a ZeroRedundancyOptimizer as part of backward."""

from .lazily import Lazily

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(hook, ddp, zero, shard_buckets=False):
    """The averaging that `hook` does, and each bucket's step as soon as it is averaged, while later
    buckets still travel: backward returns with the new weights. `zero`: a ZeroRedundancyOptimizer
    made with overlap_with_ddp, over parameters of the model `ddp`. shard_buckets is taken for
    torch's sake: parameters, not buckets, are divided. Raises ValueError (DistArgumentError)
    without overlap_with_ddp.

        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    """
    if not zero.overlap_with_ddp:
        from muster import DistArgumentError

        raise DistArgumentError(
            "hook_with_zero_step: make the ZeroRedundancyOptimizer with overlap_with_ddp"
        )

    def with_step(state, bucket):
        pending = hook(state, bucket)

        def stepped():
            value = pending.wait()
            return zero._step_bucket(
                bucket, value[0] if isinstance(value, (list, tuple)) else value
            )

        return Lazily(stepped)

    return with_step


def hook_with_zero_step_interleaved(hook, ddp, zero, shard_buckets=False):
    """torch's form that steps between two buckets' averages: `hook_with_zero_step` does."""
    return hook_with_zero_step(hook, ddp, zero, shard_buckets)
