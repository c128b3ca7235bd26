# SPDX-License-Identifier: BSD-3-Clause
"""Which modules inside a model become units of FullyShardedDataParallel, under
torch.distributed.fsdp.wrap's names.

A policy is called as `policy(module=, recurse=, nonwrapped_numel=)`: with recurse=True it says
whether to look inside the module, with False whether the module is a unit; `nonwrapped_numel` is
the number of elements of its parameters that are in no unit yet. A set of classes is a policy too,
and so are torch's.
"""

import contextlib

import torch

from muster import _C

__all__ = [
    "ModuleWrapPolicy",
    "CustomPolicy",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]


def always_wrap_policy(*args, **kwargs):
    """Every module is a unit."""
    return True


def lambda_auto_wrap_policy(module, recurse, nonwrapped_numel, lambda_fn):
    """Modules for which `lambda_fn(module)` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls):
    """Modules of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module,
    recurse,
    nonwrapped_numel,
    min_num_params=100_000_000,
    force_leaf_modules=None,
    exclude_wrap_modules=None,
):
    """Modules with at least `min_num_params` elements that are in no unit yet.
    `exclude_wrap_modules` (lists and dictionaries of modules, whose forward is not called) do not
    become units; nothing inside of `force_leaf_modules` (MultiheadAttention) is.
    """
    leaves = tuple(force_leaf_modules or (torch.nn.MultiheadAttention,))
    none = tuple(exclude_wrap_modules or (torch.nn.ModuleList, torch.nn.ModuleDict))
    large = nonwrapped_numel >= min_num_params
    return large and not isinstance(module, leaves if recurse else none)


class ModuleWrapPolicy:
    """Modules of these classes."""

    def __init__(self, module_classes):
        self._module_classes = tuple(module_classes)

    def __call__(self, module, recurse, nonwrapped_numel=0):
        return recurse or isinstance(module, self._module_classes)


class CustomPolicy:
    """Modules for which `lambda_fn(module)` is true; a dictionary that it returns instead holds
    that unit's own options.
    """

    def __init__(self, lambda_fn):
        self._lambda_fn = lambda_fn

    def __call__(self, module, recurse, nonwrapped_numel=0):
        return True if recurse else self._lambda_fn(module)


def as_call(policy):
    """`policy(module, recurse)`."""
    if isinstance(policy, (set, frozenset, list, tuple)):
        policy = ModuleWrapPolicy(policy)
    theirs = (
        getattr(policy, "_lambda_fn", None) if not callable(policy) else None
    )  # torch's CustomPolicy is no function
    if theirs is not None:
        policy = CustomPolicy(theirs)
    if not callable(policy):
        raise _C.DistArgumentError(
            "FullyShardedDataParallel: auto_wrap_policy is called as policy(module=, recurse=, "
            "nonwrapped_numel=) or is a set of classes, and this "
            f"is {type(policy).__name__}"
        )

    def call(module, recurse):
        left = sum(each.numel() for each in module.parameters() if not _C._is_sharded(each))
        return policy(module=module, recurse=recurse, nonwrapped_numel=left)

    return call


_options_of_wrap = []


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls, **wrapper_kwargs):
    """Inside of it `wrap(module)` gives `wrapper_cls(module, **wrapper_kwargs)`."""
    _options_of_wrap.append((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _options_of_wrap.pop()


def wrap(module, **wrap_overrides):
    """The module as a unit, inside of `enable_wrap`; else as it is."""
    if not _options_of_wrap:
        return module
    wrapper, options = _options_of_wrap[-1]
    return wrapper(module, **{**options, **wrap_overrides})
