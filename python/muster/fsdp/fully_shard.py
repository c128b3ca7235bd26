"""`fully_shard`: a module becomes a unit where it stands."""

import functools

import torch
from torch.utils import _pytree

from . import units
from .gradients import clip_grad_norm_
from .options import MixedPrecisionPolicy


class UnshardHandle:
    """What `unshard(async_op=True)` gives."""

    def wait(self):
        """Returns at once: the parameters are there."""


class FSDPModule:
    """What `fully_shard` makes of a module, besides what it is."""

    def __call__(self, *args, **kwargs):
        """The module's own, with its hooks, on its whole parameters. Backward on the tensors among its results (also in lists, tuples, dicts and
        dataclasses) gives each rank its shards of the averaged gradients."""
        outputs = units.run(self._fsdp_unit, super().__call__, args, kwargs)
        dtype = self._fsdp_output_dtype
        if dtype is None:
            return outputs
        return _pytree.tree_map_only(
            torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, outputs
        )

    __reduce_ex__ = units.refuse_copy  # pickle would miss the class

    def __copy__(self):
        other = self.__class__.__new__(self.__class__)
        vars(other).update(vars(self))
        return other

    def unshard(self, async_op=False):
        """Collective: the whole parameters stand in their places until `reshard()`, or the end of the next forward or backward. With async_op
        an UnshardHandle, though they are there when it returns."""
        self._fsdp_unit.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self):
        """Gives the whole parameters back."""
        self._fsdp_unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True):
        """False: backward adds whole gradients up on this rank; the first pass after True averages the sums."""
        for unit in units.units_in(self) if recurse else [self._fsdp_unit]:
            unit.require_sync = requires_gradient_sync

    def zero_grad(self, set_to_none=True):
        """The module's own; gradients that wait on this rank to be averaged are dropped too."""
        super().zero_grad(set_to_none)
        for unit in units.units_in(self):
            unit.drop_gradients()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Collective: `muster.fsdp.clip_grad_norm_` of this module."""
        return clip_grad_norm_(self, max_norm, norm_type)

    def set_modules_to_forward_prefetch(self, modules):
        """Taken for torch's sake: a unit is gathered when it is needed."""

    def set_modules_to_backward_prefetch(self, modules):
        """Taken for torch's sake: a unit is gathered when it is needed."""

    def set_is_last_backward(self, is_last_backward):
        """Taken for torch's sake: every backward pass ends by itself."""


def share_comm_ctx(modules):
    """Accepted for torch's sake: units of one group have their calls in one order anyway."""


def register_fsdp_forward_method(module, method_name):
    """Makes a method of a module that `fully_shard` was applied to gather the parameters, as calling the module does. Does nothing to others."""
    unit = units.unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name)

    @functools.wraps(method)
    def gathering(*args, **kwargs):
        return units.run(unit, method, args, kwargs)

    setattr(module, method_name, gathering)


def fully_shard(
    module,
    *,
    mesh=None,
    reshard_after_forward=None,
    mp_policy=None,
    offload_policy=None,
    ignored_params=None,
    process_group=None,
):
    """Makes what of `module` is in no unit yet a unit, in place: inner modules first, then those around them.

    Returns the module, which is an `FSDPModule` too. Its parameters stay the tensors that they are; between passes each holds, in one dimension,
    the elements of it that lie on this rank. `state_dict()` of the module is that of the shards, `muster.fsdp.get_model_state_dict` gives the
    whole. mesh (of one dimension) or process_group: None is the default group. reshard_after_forward=False: whole parameters stay until
    backward. mp_policy: a `MixedPrecisionPolicy`. ignored_params: what stays whole, and is nobody's business. Rank 0's values go to all first.

    `muster.fsdp.clip_grad_norm_` clips by the norm of all ranks: torch's own sees this rank's shards, as does whatever else looks at a
    parameter's shape or asks whether all gradients are finite.

    Collective, like forward and backward; else as FullyShardedDataParallel.
    """
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        units.refuse("offload_policy is not there: parameters stay on the module's device")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        units.refuse(
            f"reshard_after_forward is True or False, and {reshard_after_forward!r} was given: parameters are resharded to all ranks"
        )
    if isinstance(module, (list, tuple)):
        units.refuse("fully_shard takes one module; a unit of several is one that has them inside")
    if units.unit_of(module) is not None:
        units.refuse(f"this {type(module).__name__} is sharded already")
    if any(units.WRAPPED in each._modules for each in module.modules()):
        units.refuse(
            "FullyShardedDataParallel is around a part of this module already: use one of the two for a model, or their states mix"
        )
    policy = mp_policy or MixedPrecisionPolicy()
    unit = units.make_unit(
        module,
        set(map(id, ignored_params or ())),
        units.group_from(process_group, mesh),
        policy,
        reshard_after_forward is not False,
        True,
    )

    module._fsdp_unit, module._fsdp_output_dtype = unit, policy.output_dtype
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    return module
