# SPDX-License-Identifier: BSD-3-Clause
"""A module and its unit: the parameters of it that are gathered and given back together."""

import contextlib
import os
import sys
import weakref

import torch
from torch.distributed.utils import _apply_to_tensors

import muster as dist
from muster import _C
from muster.nn import sync_batch_norm
from muster.nn.modules_in_use import tensors_in

WRAPPED = "_fsdp_wrapped_module"
_WRAPPERS = (WRAPPED + ".", "_checkpoint_wrapped_module.")


def refuse(text):
    """Raises what bad arguments raise."""
    raise _C.DistArgumentError(f"FullyShardedDataParallel: {text}")


def refuse_copy(*_):
    """In place of what copies or pickles an object."""
    refuse(
        "a sharded module is not copied or pickled: it is part of a model on all ranks. Copy the "
        "module before it is sharded, or save a state_dict and load it"
    )


alive = weakref.WeakSet()  # all units of this process
_C._ShardedUnit.__reduce_ex__ = refuse_copy  # copies and pickles of a module reach its unit


def plain(name):
    """The name that a parameter has without the wrappers around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unit_of(module):
    """The unit that `module` itself has, or None."""
    return vars(module).get("_fsdp_unit")  # wrappers pass on what is asked of them


def units_in(module):
    """Those of `module` and of the modules inside, from outside in; they are made on all ranks in
    one order, and so is this list.
    """
    found = (unit_of(each) for each in module.modules())
    return list(dict.fromkeys(each for each in found if each is not None))


def divided_by_rows(unit):
    """Its `rows.UnitRows` where `fully_shard` made it; else None."""
    module = sys.modules.get("muster.fsdp.rows")  # imports DTensor
    return None if module is None else module.rows_of(unit)


def shown_parameters(unit):
    """The unit's parameters as its model shows them between passes."""
    of = divided_by_rows(unit)
    return unit.parameters() if of is None else of.parameters


def groups_from(process_group, mesh, hybrid):
    """(The group whose ranks share the parameters, the one whose ranks hold the same or None).
    hybrid: process_group is a tuple of the two, or the mesh has two dimensions, of which the first
    replicates. A group that is None is the default group.
    """
    if mesh is not None:
        if process_group is not None:
            refuse("give process_group or a mesh, not both")
        if mesh.ndim != (2 if hybrid else 1):
            refuse(
                f"the mesh has {mesh.ndim} dimensions: hybrid sharding takes two, of which the "
                "first replicates and the second shards, and "
                "every other strategy one: give mesh['name'] of that one"
            )
        return (mesh.get_group(1), mesh.get_group(0)) if hybrid else (mesh.get_group(), None)
    if not hybrid:
        return process_group, None
    if process_group is None:
        return _host_groups()
    if not isinstance(process_group, (tuple, list)) or len(process_group) != 2:
        refuse("hybrid sharding takes a mesh, or (group that shares, group that replicates)")
    return tuple(process_group)


def _host_groups():
    """Shards within a host and replicas over hosts, as the launcher has numbered the ranks."""
    size, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local <= 0 or size % local != 0:
        refuse(
            "hybrid sharding without groups shares parameters within a host, and the launcher did "
            "not set LOCAL_WORLD_SIZE to the number of "
            "its ranks: give a device_mesh of two dimensions, or (group that shares, group that "
            "replicates)"
        )
    mesh = dist.init_device_mesh("cpu", (size // local, local))
    return mesh.get_group(1), mesh.get_group(0)


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


def _own_modules(module):
    """`module` and the modules inside that have no unit."""
    yield module
    for child in module.children():
        if unit_of(child) is None:
            yield from _own_modules(child)


def materialize(module, ignored, init, device):
    """Memory and values for what is on the meta device in `module` and in no unit inside: by
    `init(part)` of each module that has some of its own, or by its `reset_parameters`. The tensors
    stay the same objects.
    """
    for part in dict.fromkeys(_own_modules(module)):
        meta = [
            each
            for each in (*part.parameters(recurse=False), *part.buffers(recurse=False))
            if each.is_meta and id(each) not in ignored
        ]
        if not meta:
            continue
        if init is None and not hasattr(part, "reset_parameters"):
            refuse(
                f"{type(part).__name__} has parameters or buffers on the meta device and no "
                "reset_parameters(): give param_init_fn"
            )
        for each in meta:
            _C._materialize(each, device)
        with torch.no_grad():
            part.reset_parameters() if init is None else init(part)


_timelines = []


@contextlib.contextmanager
def recorded_in(timeline):
    """Units made while it lasts record what they do in `timeline`, a `_C._ShardedTimeline`, as
    (unit, event, seconds) in order.
    """
    _timelines.append(timeline)
    try:
        yield
    finally:
        _timelines.pop()


def timeline():
    """That of the innermost `recorded_in`, or None."""
    return _timelines[-1] if _timelines else None


def prepare(module, ignored):
    """Refuses a module that can be no unit."""
    sync_batch_norm.adopt(module)
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        refuse(f"nobody calls the forward of a {type(module).__name__}: shard the modules in it")
    lazy = [
        name
        for name, each in _own(module, ignored)[0]
        if isinstance(each, torch.nn.parameter.UninitializedParameter)
    ]
    if lazy:
        refuse(
            f"{', '.join(lazy)}: a lazy module has no parameters yet; run a forward pass before it "
            "is sharded"
        )


def make_unit(module, ignored, group, init=None, **options):
    """Collective: of what is in no unit inside of `module` and not among `ignored` (ids of
    parameters and buffers). `options` by the names that they have in C++.
    """
    prepare(module, ignored)
    materialize(module, ignored, init, options.get("device") or torch.device("cpu"))
    parameters, buffers = _own(module, ignored)
    options["timeline"] = timeline()
    unit = _C._ShardedUnit(type(module).__name__, parameters, buffers, group, options)
    alive.add(unit)
    return unit


def run(unit, forward, args, kwargs):
    """`forward(*args, **kwargs)` of the unit's module, on whole parameters."""
    of = divided_by_rows(unit)
    if of is not None:
        of.ready()
    given = []
    _apply_to_tensors(lambda each: given.append(each) or each, (args, kwargs))
    inputs = unit.before_forward(given)
    if any(
        mine is not theirs for mine, theirs in zip(inputs, given)
    ):  # else lists and dictionaries stay the caller's own
        left = iter(inputs)
        args, kwargs = _apply_to_tensors(lambda _: next(left), (args, kwargs))
    try:
        with contextlib.nullcontext() if of is None else of.in_forward():
            outputs = forward(*args, **kwargs)
    except BaseException:
        unit.leave_forward()
        raise
    unit.after_forward(tensors_in(outputs, []))
    if of is not None:
        of.follow(outputs)
    return outputs


def parameters_by_name(module):
    """By `module`'s own names without wrappers, shared parameters by each of theirs: (the unit, the
    parameter's number there), or None for a parameter in no unit.
    """
    places = {
        id(each): (unit, index)
        for unit in units_in(module)
        for index, each in enumerate(shown_parameters(unit))
    }
    return {
        plain(name): places.get(id(each))
        for name, each in module.named_parameters(remove_duplicate=False)
    }
