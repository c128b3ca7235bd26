"""A module and its unit: the parameters of it that are gathered and given back together."""

import torch
from torch.utils import _pytree

from muster import _C
from muster.nn.parallel import _refuse_sync_batch_norm, _tensors_in

from .options import native

WRAPPED = "_fsdp_wrapped_module"


def refuse(text):
    """Raises what bad arguments raise."""
    raise _C.DistArgumentError(f"FullyShardedDataParallel: {text}")


def plain(name):
    """The name that a parameter has without the wrappers around its modules."""
    return name.replace(WRAPPED + ".", "")


def unit_of(module):
    """The unit that `module` itself has, or None."""
    return getattr(module, "_fsdp_unit", None)


def units_in(module):
    """Those of `module` and of the modules inside, from outside in; they are made on all ranks in one order, and so is this list."""
    return [unit_of(each) for each in module.modules() if unit_of(each) is not None]


def group_from(process_group, mesh):
    """The one of the two that was given; None is the default group."""
    if mesh is None:
        return process_group
    if process_group is not None:
        refuse("give process_group or a mesh, not both")
    if mesh.ndim != 1:
        refuse(f"the mesh has {mesh.ndim} dimensions, and parameters are sharded over one: give mesh['name'] of that one")
    return mesh.get_group()


def make_unit(module, ignored, group, precision, reshard_after_forward, sync_module_states):
    """Collective: of the parameters of `module` that are in no unit yet and not among `ignored` (ids)."""
    _refuse_sync_batch_norm(module, "FullyShardedDataParallel")
    wanted = [(plain(name), each) for name, each in module.named_parameters() if not _C._is_sharded(each) and id(each) not in ignored]
    lazy = [name for name, each in wanted if isinstance(each, torch.nn.parameter.UninitializedParameter)]
    if lazy:
        refuse(f"{', '.join(lazy)}: a lazy module has no parameters yet; run a forward pass before it is sharded")
    meta = [name for name, each in wanted if each.is_meta]
    if meta:
        refuse(f"{', '.join(meta)}: on the meta device parameters have no values; give the module some first (to_empty, and its own initialisation)")
    elsewhere = {id(each) for inner in module.modules() if inner is not module and unit_of(inner) for each in inner.buffers()}
    buffers = [(plain(name), each) for name, each in module.named_buffers() if id(each) not in elsewhere]
    return _C._ShardedUnit(type(module).__name__, wanted, buffers, group, native(precision), reshard_after_forward, sync_module_states)


def run(unit, forward, args, kwargs):
    """`forward(*args, **kwargs)` of the unit's module, on whole parameters."""
    leaves, form = _pytree.tree_flatten((args, kwargs))
    where = [at for at, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
    for at, tensor in zip(where, unit.before_forward([leaves[at] for at in where])):
        leaves[at] = tensor
    args, kwargs = _pytree.tree_unflatten(leaves, form)
    try:
        outputs = forward(*args, **kwargs)
    except BaseException:
        unit.leave_forward()
        raise
    unit.after_forward(_tensors_in(outputs, []))
    return outputs
