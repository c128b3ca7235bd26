"""`fully_shard`: a module becomes a unit where it stands."""

import torch
from torch.utils import _pytree

from . import units
from .options import MixedPrecisionPolicy


class FSDPModule:
    """What `fully_shard` makes of a module, besides what it is."""

    def forward(self, *args, **kwargs):
        """The module's own, on its whole parameters. Backward on the tensors among its results (also in lists, tuples, dicts and dataclasses)
        gives each rank its shards of the averaged gradients."""
        outputs = units.run(self._fsdp_unit, super().forward, args, kwargs)
        dtype = self._fsdp_output_dtype
        if dtype is None:
            return outputs
        return _pytree.tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, outputs)

    def unshard(self, async_op=False):
        """Collective: the whole parameters stand in their places until `reshard()`. async_op=True is refused."""
        if async_op:
            units.refuse("unshard gathers at once: async_op=True is not there")
        self._fsdp_unit.unshard()

    def reshard(self):
        """Gives the whole parameters back."""
        self._fsdp_unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True):
        """False: backward adds whole gradients up on this rank; the first pass after True averages the sums."""
        for unit in units.units_in(self) if recurse else [self._fsdp_unit]:
            unit.require_sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward):
        """Taken for torch's sake: every backward pass ends by itself."""


def fully_shard(module, *, mesh=None, reshard_after_forward=None, mp_policy=None, offload_policy=None, ignored_params=None,
                process_group=None):
    """Makes what of `module` is in no unit yet a unit, in place: inner modules first, then those around them.

    Returns the module, which is an `FSDPModule` too. Its parameters stay the tensors that they are; between passes each holds, in one dimension,
    the elements of it that lie on this rank. `state_dict()` of the module is that of the shards, `muster.fsdp.get_model_state_dict` gives the
    whole. mesh (of one dimension) or process_group: None is the default group. reshard_after_forward=False: whole parameters stay until
    backward. mp_policy: a `MixedPrecisionPolicy`. ignored_params: what stays whole, and is nobody's business. Rank 0's values go to all first.

    Collective, like forward and backward; else as FullyShardedDataParallel.
    """
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        units.refuse("offload_policy is not there: parameters stay on the module's device")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        units.refuse(f"reshard_after_forward is True or False, and {reshard_after_forward!r} was given: parameters are resharded to all ranks")
    if isinstance(module, (list, tuple)):
        units.refuse("fully_shard takes one module; a unit of several is one that has them inside")
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        units.refuse(f"nobody calls the forward of a {type(module).__name__}: shard the modules in it")
    if units.unit_of(module) is not None:
        units.refuse(f"this {type(module).__name__} is sharded already")
    if "forward" in vars(module):
        units.refuse(f"this {type(module).__name__} has a forward of its own, apart from its class: it would not gather the parameters")
    policy = mp_policy or MixedPrecisionPolicy()
    unit = units.make_unit(module, set(map(id, ignored_params or ())), units.group_from(process_group, mesh), policy,
                           reshard_after_forward is not False, True)

    module._fsdp_unit, module._fsdp_output_dtype = unit, policy.output_dtype
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    return module
