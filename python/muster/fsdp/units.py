"""A module and its unit: the parameters of it that are gathered and given back together."""

import weakref

import torch
from torch.utils import _pytree

from muster import _C
from muster.nn import sync_batch_norm
from muster.nn.modules_in_use import tensors_in

from .options import native

WRAPPED = "_fsdp_wrapped_module"
_WRAPPERS = (WRAPPED + ".", "_checkpoint_wrapped_module.")


def refuse(text):
    """Raises what bad arguments raise."""
    raise _C.DistArgumentError(f"FullyShardedDataParallel: {text}")


def refuse_copy(*_):
    """In place of what copies or pickles an object."""
    refuse(
        "a sharded module is not copied or pickled: it is part of a model on all ranks. Copy the module "
        "before it is sharded, or save a state_dict and load it"
    )


alive = weakref.WeakSet()  # all units of this process
_C._ShardedUnit.__reduce_ex__ = refuse_copy  # whoever copies or pickles a module comes to its unit


def plain(name):
    """The name that a parameter has without the wrappers around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unit_of(module):
    """The unit that `module` itself has, or None."""
    return vars(module).get("_fsdp_unit")  # wrappers pass on what is asked of them


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
        refuse(
            f"the mesh has {mesh.ndim} dimensions, and parameters are sharded over one: give mesh['name'] of that one"
        )
    return mesh.get_group()


def _own(module, ignored):
    """Named parameters and buffers of `module` and of the modules inside that have no unit."""
    parameters, buffers, seen = [], [], set()

    def visit(part, path):
        seen.add(id(part))
        for found, of in ((parameters, part._parameters), (buffers, part._buffers)):
            found += [
                (plain(path + name), each)
                for name, each in of.items()
                if each is not None and id(each) not in ignored
            ]
        for name, child in part._modules.items():
            if child is not None and id(child) not in seen and unit_of(child) is None:
                visit(child, f"{path}{name}.")

    visit(module, "")
    return parameters, buffers


def make_unit(module, ignored, group, precision, reshard_after_forward, sync_module_states):
    """Collective: of what is in no unit inside of `module` and not among `ignored` (ids of parameters and buffers)."""
    sync_batch_norm.adopt(module)
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        refuse(f"nobody calls the forward of a {type(module).__name__}: shard the modules in it")
    parameters, buffers = _own(module, ignored)
    lazy = [
        name
        for name, each in parameters
        if isinstance(each, torch.nn.parameter.UninitializedParameter)
    ]
    if lazy:
        refuse(
            f"{', '.join(lazy)}: a lazy module has no parameters yet; run a forward pass before it is sharded"
        )
    meta = [name for name, each in parameters if each.is_meta]
    if meta:
        refuse(
            f"{', '.join(meta)}: on the meta device parameters have no values; give the module some first (to_empty, and its own initialisation)"
        )
    precision, cast_root_forward_inputs = native(precision)
    unit = _C._ShardedUnit(
        type(module).__name__,
        parameters,
        buffers,
        group,
        precision,
        cast_root_forward_inputs,
        reshard_after_forward,
        sync_module_states,
    )
    alive.add(unit)
    return unit


def run(unit, forward, args, kwargs):
    """`forward(*args, **kwargs)` of the unit's module, on whole parameters."""
    leaves, form = _pytree.tree_flatten((args, kwargs))
    where = [at for at, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
    given = [leaves[at] for at in where]
    inputs = unit.before_forward(given)
    if any(
        mine is not theirs for mine, theirs in zip(inputs, given)
    ):  # else lists and dictionaries stay the caller's own
        for at, tensor in zip(where, inputs):
            leaves[at] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, form)
    try:
        outputs = forward(*args, **kwargs)
    except BaseException:
        unit.leave_forward()
        raise
    unit.after_forward(tensors_in(outputs, []))
    return outputs


def parameters_by_name(module):
    """Of `module`'s own names without wrappers, shared parameters by each: (the unit, the parameter's number there); None of what is in no unit."""
    places = {
        id(each): (unit, index)
        for unit in units_in(module)
        for index, each in enumerate(unit.parameters())
    }
    return {
        plain(name): places.get(id(each))
        for name, each in module.named_parameters(remove_duplicate=False)
    }
