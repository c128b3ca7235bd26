# SPDX-License-Identifier: BSD-3-Clause
"""How a function is run on the worker that is asked for it."""

import functools


def async_execution(fn):
    """Marks a function that returns a torch.futures.Future: its thread is free at once, and the
    caller gets the future's value when it is done. The inner one where it is combined with
    @staticmethod or @classmethod.
    """

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn
    return wrapper
