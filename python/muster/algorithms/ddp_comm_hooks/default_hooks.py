# SPDX-License-Identifier: BSD-3-Clause
"""Averaging, in the gradients' own dtype or in 16 bits. `state` is the group to average over; None:
the model's own, which is what one wants.

Each hook can be registered, and called with (state, bucket) inside of one of your own: it then
returns a `Lazily`.
"""

import torch

from muster import _C

from .lazily import Lazily

__all__ = [
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "int8_compress_hook",
    "int4_compress_hook",
    "fp16_compress_wrapper",
    "bf16_compress_wrapper",
]


class NativeHook:
    """A hook that runs in C++: `make(state)` gives it."""

    def __init__(self, name, make, doc):
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        self._make = make

    def native(self, state):
        """The C++ hook."""
        return self._make(state)

    def __call__(self, state, bucket):
        return Lazily(self._make(state)(bucket).wait)

    def __repr__(self):
        return f"<hook {self.__name__}>"


allreduce_hook = NativeHook(
    "allreduce_hook",
    _C._all_reduce_hook,
    "The average over the ranks: what happens without a hook.",
)
fp16_compress_hook = NativeHook(
    "fp16_compress_hook",
    _C._fp16_compress_hook,
    "The average, sent as float16 and divided first: half the bytes, fewer bits.",
)
bf16_compress_hook = NativeHook(
    "bf16_compress_hook", _C._bf16_compress_hook, "The average, sent as bfloat16 and divided first."
)
int8_compress_hook = NativeHook(
    "int8_compress_hook",
    _C._int8_compress_hook,
    "The average by `muster.quantized.all_reduce` in int8: a fourth of the bytes of float32.",
)
int4_compress_hook = NativeHook(
    "int4_compress_hook",
    _C._int4_compress_hook,
    "The average by `muster.quantized.all_reduce` in int4: an eighth of the bytes of float32.",
)


def _compressed(hook, dtype):
    def wrapped(state, bucket):
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))
        pending = hook(state, bucket)

        def decompressed():
            value = pending.wait()
            bucket.set_buffer(buffer)  # the bucket has its own gradients again, for later readers
            return (value[0] if isinstance(value, (list, tuple)) else value).to(buffer.dtype)

        return Lazily(decompressed)

    wrapped.__name__ = f"{getattr(hook, '__name__', 'hook')} in {str(dtype).removeprefix('torch.')}"
    return wrapped


def fp16_compress_wrapper(hook):
    """`hook` on buckets cast to float16."""
    return _compressed(hook, torch.float16)


def bf16_compress_wrapper(hook):
    """`hook` on buckets cast to bfloat16."""
    return _compressed(hook, torch.bfloat16)
