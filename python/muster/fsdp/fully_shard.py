# SPDX-License-Identifier: BSD-3-Clause
"""`fully_shard`: a module becomes a unit where it stands."""

import dataclasses
import functools

import torch
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.utils import _apply_to_tensors

import muster as dist
from muster import _C
from muster.tensor import _meshes

from . import rows, units
from .gradients import clip_grad_norm_
from .options import MixedPrecisionPolicy, native


class UnshardHandle:
    """The result of `unshard(async_op=True)`."""

    def wait(self):
        """Returns once the whole parameters stand in their places."""


class _UnshardHandle(UnshardHandle):
    def __init__(self, unit):
        self._unit = unit

    def wait(self):
        if self._unit is not None:
            _unshard(self._unit)
        self._unit = None


def _unshard(unit):
    of = rows.rows_of(unit)
    of.ready()
    unit.unshard()
    of.hold()


@functools.cache
def _keep_dynamo_out():
    """Of the frames that exchange parameters, of which it would read those from before; what they
    call is compiled all the same. Importing dynamo takes a while.
    """
    import torch._dynamo

    units.run = torch._dynamo.disable(units.run, recursive=False)
    FSDPModule.__call__ = torch._dynamo.disable(FSDPModule.__call__, recursive=False)


class GradientReductionHandle:
    """The result of `finalize_backward(async_op=True)`."""

    def wait(self):
        """Returns at once: the gradients are averages already."""


class FSDPModule:
    """The class that `fully_shard` adds to a module's own."""

    def __new__(cls, *args, **kwargs):
        """A module of the class without this one: a container makes one where it is sliced."""
        return cls.__mro__[cls.__mro__.index(FSDPModule) + 1](*args, **kwargs)

    def __call__(self, *args, **kwargs):
        """The module's own, with its hooks, on its whole parameters. Backward on the tensors among
        its results (also in lists, tuples, dicts and dataclasses) gives each rank its shards of the
        averaged gradients.
        """
        event = vars(self).pop("_fsdp_post_optim_event", None)
        if event is not None:
            event.wait()
        outputs = units.run(self._fsdp_unit, super().__call__, args, kwargs)
        dtype = self._fsdp_output_dtype
        if dtype is None:
            return outputs
        return _apply_to_tensors(
            lambda each: each.to(dtype) if each.is_floating_point() else each, outputs
        )

    __reduce_ex__ = units.refuse_copy  # pickle would miss the class

    def __copy__(self):
        other = object.__new__(self.__class__)
        vars(other).update(vars(self))
        return other

    def _fsdp_modules(self, recurse=True):
        return [
            each
            for each in (self.modules() if recurse else [self])
            if units.unit_of(each) is not None
        ]

    def _fsdp_units(self, recurse=True):
        return [units.unit_of(each) for each in self._fsdp_modules(recurse)]

    def to_empty(self, *, device, recurse=True):
        """Memory for what is on the meta device. Returns the module. Sharded parameters have memory
        already: not-a-number until they are set. On another device: ValueError (DistArgumentError).
        """
        for each in (*self.parameters(recurse), *self.buffers(recurse)):
            if each.is_meta:
                _C._materialize(each, torch.device(device))
            elif each.device.type != torch.device(device).type:
                units.refuse(
                    f"to_empty: the module was sharded on {each.device}; shard it with a mesh of "
                    f"{device}"
                )
        return self

    def unshard(self, async_op=False):
        """Collective: the whole parameters stand in their places until `reshard()`, or the end of
        the next forward or backward. With async_op they are on their way: an UnshardHandle, whose
        `wait()` puts them in their places, as the next forward does by itself.
        """
        if async_op:
            rows.rows_of(self._fsdp_unit).ready()
            self._fsdp_unit.start_unshard()
            return _UnshardHandle(self._fsdp_unit)
        _unshard(self._fsdp_unit)
        return None

    def reshard(self):
        """Gives the whole parameters back."""
        self._fsdp_unit.reshard()
        rows.rows_of(self._fsdp_unit).let_go()

    def reset_iter_state(self):
        """After an exception in forward or backward: gives whole parameters back and drops the
        gradients that wait to be averaged. Raises DistError where the exception has ended the
        model's group: make a new model of the same module then.
        """
        for unit in self._fsdp_units():
            rows.rows_of(unit).reset()
            unit.reset()

    # ---- gradients ----

    def set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True):
        """False: backward adds whole gradients up on this rank; the first pass after True averages
        the sums.
        """
        for each in self._fsdp_modules(recurse):
            each._fsdp_wants_sync = requires_gradient_sync
            unit = each._fsdp_unit
            unit.require_sync = requires_gradient_sync and not each._fsdp_manual
            unit.set_reduce_over_replicas(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce, *, recurse=True):
        """With hybrid sharding. False: gradients are reduced among the ranks that share the
        parameters, and this rank keeps the sums; the first pass after True takes them along to the
        replicas.
        """
        for unit in self._fsdp_units(recurse):
            unit.set_reduce_over_replicas(requires_all_reduce)

    def set_manual_backward_finalization(self, enabled):
        """True: backward leaves whole gradients on this rank, and `finalize_backward` averages
        them.
        """
        for each in self._fsdp_modules():
            each._fsdp_manual = enabled
            each._fsdp_unit.require_sync = each._fsdp_wants_sync and not enabled

    def finalize_backward(self, *, async_op=False):
        """Collective, after `set_manual_backward_finalization(True)` and any number of backward
        passes: averages their gradients before it returns; with async_op it gives a
        GradientReductionHandle all the same.
        """
        for each in self._fsdp_modules():
            if each._fsdp_wants_sync:
                each._fsdp_unit.reduce_now()
        return GradientReductionHandle() if async_op else None

    def set_gradient_divide_factor(self, factor):
        """Divides sums of gradients by `factor`, in place of the number of ranks."""
        self._fsdp_unit.set_divisor(float(factor))

    def set_reduce_scatter_divide_factor(self, factor):
        """`set_gradient_divide_factor`, by its former name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook, *, stream=None):
        """`hook(gradients)` is called with this rank's reduced shard, one dimension, and may change
        it in place; on `stream`, if one is given.
        """

        def on_stream(gradients):
            with torch.get_device_module(gradients.device).stream(stream):
                hook(gradients)

        self._fsdp_unit.set_after_reduction(hook if stream is None else on_stream)

    def set_custom_all_gather(self, comm):
        """`comm(output_tensor, input_tensor, group, async_op)` gathers in place of
        all_gather_into_tensor; a Work that it returns is waited for. Memory is the unit's own:
        `comm.allocate` is not called.
        """
        self._fsdp_unit.set_all_gather(
            lambda output, given, group: _wait(comm(output, given, group, False))
        )

    def set_custom_reduce_scatter(self, comm):
        """`comm(output_tensor, input_tensor, group, op, async_op)` likewise, in place of
        reduce_scatter_tensor.
        """
        self._fsdp_unit.set_reduce_scatter(
            lambda output, given, group: _wait(comm(output, given, group, dist.ReduceOp.SUM, False))
        )

    # ---- when parameters are whole ----

    def set_reshard_after_forward(self, reshard_after_forward, recurse=True):
        """Whether whole parameters are given back between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            units.refuse(
                f"set_reshard_after_forward takes a bool, and {reshard_after_forward!r} was given"
            )
        for unit in self._fsdp_units(recurse):
            unit.set_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward, *, recurse=True):
        """False: whole values stay in memory after backward, and the next forward takes them unless
        the shards have changed since. Changes through `.data` and `torch._foreach` are not seen:
        call `reshard()` after them.
        """
        for unit in self._fsdp_units(recurse):
            unit.set_keep_after_backward(not reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward):
        """False: backward does not need the values of these parameters (an embedding's), and
        nothing is gathered for it.
        """
        self._fsdp_unit.set_unshard_in_backward(unshard_in_backward)

    def set_keep_unsharded_storage(self, keep, *, recurse=True):
        """True: the memory of whole parameters stays allocated, at one address, while they are not
        whole.
        """
        for unit in self._fsdp_units(recurse):
            unit.set_keep_storage(keep)

    def set_modules_to_forward_prefetch(self, modules):
        """The FSDPModules whose parameters begin to be gathered once this one's are whole in
        forward. Both go on at the same time.
        """
        self._fsdp_unit.set_forward_prefetch(_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules):
        """The same for backward, in place of the one that came before in forward. An empty list:
        none.
        """
        self._fsdp_unit.set_backward_prefetch(_units_of(modules))

    def set_post_optim_event(self, event):
        """The next forward of this module lets its stream wait for `event`, once."""
        self._fsdp_post_optim_event = event

    # ---- what the engine does anyway ----

    def set_is_last_backward(self, is_last_backward):
        """Changes nothing: every backward pass ends by itself."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params, *, recurse=True):
        """Changes nothing: a gradient that only some ranks have counts as zero on the others."""

    def set_force_sum_reduction_for_comms(self, enable):
        """Changes nothing: gradients are divided before they are summed."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers, *, recurse=True):
        """Changes nothing: there is one buffer, and it is free again before the next reduction. At
        least 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is an int, and {max_input_buffers!r} was given")
        if max_input_buffers < 1:
            units.refuse(f"max_input_buffers is at least 1, and {max_input_buffers} was given")

    def _set_unshard_async_op(self, async_op):
        """Changes nothing: what is gathered ahead never waits for what computes."""

    def set_separate_reduce_scatter_group(self, enable=True, *, recurse=True):
        """Changes nothing: a reduction ends before backward goes on."""

    def set_allocate_memory_from_process_group_for_comm(self, enable):
        """Changes nothing: buffers are in memory that ranks of a host share."""

    def set_symm_mem_for_comm(self, backend="NCCL"):
        """Changes nothing, for the same reason."""

    # ---- steps ----

    def zero_grad(self, set_to_none=True):
        """The module's own; gradients that wait on this rank to be averaged are dropped too."""
        super().zero_grad(set_to_none)
        for unit in units.units_in(self):
            unit.drop_gradients()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Collective: `muster.fsdp.clip_grad_norm_` of this module."""
        return clip_grad_norm_(self, max_norm, norm_type)


def _wait(work):
    if work is not None:
        work.wait()


def _units_of(modules):
    for each in modules:
        if not isinstance(each, FSDPModule):
            units.refuse(f"fully_shard was not applied to this {type(each).__name__}")
    return [each._fsdp_unit for each in modules]


def share_comm_ctx(modules):
    """Accepted for torch's sake: units of one group have their calls in one order anyway."""


def register_fsdp_forward_method(module, method_name):
    """Makes a method of a module that `fully_shard` was applied to gather the parameters, as
    calling the module does. Does nothing to others.
    """
    unit = units.unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name)

    @functools.wraps(method)
    def gathering(*args, **kwargs):
        return units.run(unit, method, args, kwargs)

    setattr(module, method_name, gathering)


@dataclasses.dataclass
class _Ranks:
    """Those that share a unit's parameters: group, replicas (or None), whether parameters are
    divided at all, and torch's mesh of (replicas,) shards.
    """

    group: object
    replicas: object
    shards: bool
    mesh: object


def _ranks_of(process_group, mesh, dims):
    if dims is not None:
        return _ranks_by_name(mesh, dims)
    over = mesh
    if isinstance(mesh, _meshes.TorchMesh):
        mesh = _meshes.from_torch(mesh)
    hybrid = mesh is not None and mesh.ndim == 2
    group, replicas = units.groups_from(process_group, mesh, hybrid)
    if mesh is None:
        group = dist.group.WORLD if group is None else group
        return _Ranks(group, None, True, _meshes.mesh_over(group) if group else None)
    return _Ranks(group, replicas, True, _meshes.as_torch(over))


def _ranks_by_name(mesh, dims):
    """As `DataParallelMeshDims` says."""
    if mesh is None:
        units.refuse("dp_mesh_dims names dimensions of a mesh: give it too")
    if isinstance(mesh, _meshes.TorchMesh):
        mesh = _meshes.from_torch(mesh)

    def part(names):
        part = mesh[names if len(names) > 1 else names[0]]
        return part._flatten() if len(names) > 1 else part

    parts = [part(each) for each in (dims.replicate_names, dims.shard_names) if each]
    made = [_meshes.as_torch(each) for each in parts]
    of = made[0] if len(made) == 1 else _meshes.TorchMesh._concatenate(made)
    groups = [each.get_group() for each in parts]
    return _Ranks(groups[-1], groups[0] if len(groups) > 1 else None, bool(dims.shard_names), of)


def _check_order(mesh):
    """DTensor counts a rank's rows by its place in the mesh, the engine by its rank in the
    group.
    """
    for dim in range(mesh.ndim):
        if mesh.get_coordinate()[dim] != mesh.get_group(dim).rank():
            units.refuse(
                f"the ranks of the mesh's dimension {dim} are not sorted: give "
                "preserve_rank_order=True to the mesh, or sort them"
            )


def _device_of(mesh):
    """The device of whole parameters; None: they stay on theirs."""
    if mesh is None or mesh.device_type == "cpu":
        return None
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _checked_modules(module):
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        units.refuse("fully_shard takes a module, or a list of modules that are one unit")
    for each in modules:
        if units.unit_of(each) is not None:
            units.refuse(f"this {type(each).__name__} is sharded already")
        if any(units.WRAPPED in part._modules for part in each.modules()):
            units.refuse(
                "FullyShardedDataParallel is around a part of this module already: use one of the "
                "two for a model, or their states mix"
            )
    return modules


def _make_unit(modules, ignored, init, ranks, placement_of, options):
    """Collective. The unit of the modules' parameters that are in none yet, and its rows."""
    for each in modules:
        units.prepare(each, ignored)
        if init is not None:
            units.materialize(each, ignored, init, options["device"] or torch.device("cpu"))
    members = rows.members_of(
        modules,
        ignored,
        lambda each: units.unit_of(each) is not None,
        placement_of,
        ranks.mesh,
        ranks.mesh.size(ranks.mesh.ndim - 1) if ranks.shards else 1,
    )
    buffers = [each for module in modules for each in units._own(module, ignored)[1]]
    leaves = [(units.plain(each.name), each.leaf) for each in members]
    options["timeline"] = units.timeline()
    unit = _C._ShardedUnit(
        ", ".join(type(each).__name__ for each in modules),
        leaves,
        buffers,
        ranks.group,
        options,
        [each.dim for each in members],
    )
    units.alive.add(unit)
    return unit, rows.UnitRows(unit, members, ranks.mesh, ranks.shards)


def fully_shard(
    module,
    *,
    mesh=None,
    reshard_after_forward=None,
    shard_placement_fn=None,
    mp_policy=None,
    offload_policy=None,
    ignored_params=None,
    dp_mesh_dims=None,
    process_group=None,
    param_init_fn=None,
):
    """Makes what of `module` is in no unit yet a unit, in place: inner modules first, then those
    around them. A list of modules is one unit, for parameters that they share.

    Returns its argument; each module is an `FSDPModule` too. Each parameter becomes a DTensor,
    which keeps its shape and has the rows that lie on this rank; torch's optimizers,
    `clip_grad_norm_` and checkpoints see the whole. Make the optimizer after it. Whole parameters
    stand in the modules while their unit's forward or backward goes on. `state_dict()` is that of
    the DTensors, `muster.fsdp.get_model_state_dict` gives the whole.

    mesh or process_group: None is the default group. A mesh of two dimensions is hybrid sharding:
    the first replicates, the second shares; dp_mesh_dims (`DataParallelMeshDims`) names other
    dimensions. Parameters that are DTensors of another dimension of the same mesh (tensor
    parallelism) are divided further. reshard_after_forward=False: whole parameters stay until
    backward; a number of ranks that divides the group's: they stay divided among so many
    neighbours. shard_placement_fn(parameter) gives `Shard(dim)`, or None for dimension 0.
    mp_policy: a `MixedPrecisionPolicy`. offload_policy: `CPUOffloadPolicy()` has shards, gradients
    and the optimizer's state on the CPU. ignored_params: stay whole; not sharded or averaged.

    Parameters on the meta device get memory that is not-a-number until it is set, by
    `reset_parameters()` or otherwise, on the DTensors. With `param_init_fn(part)` they get values
    before they are divided, and rank 0's go to all first, as those of other parameters do.

    Collective, like forward and backward; else as FullyShardedDataParallel.
    """
    if reshard_after_forward is not None and (
        not isinstance(reshard_after_forward, int)
        or (not isinstance(reshard_after_forward, bool) and reshard_after_forward < 1)
    ):
        units.refuse(
            "reshard_after_forward is True, False or a number of ranks, and "
            f"{reshard_after_forward!r} was given"
        )
    modules = _checked_modules(module)
    _keep_dynamo_out()
    policy = mp_policy or MixedPrecisionPolicy()
    ranks = _ranks_of(process_group, mesh, dp_mesh_dims)
    if ranks.mesh is not None:
        _check_order(ranks.mesh)
    options = dict(
        replicas=ranks.replicas,
        shards=ranks.shards,
        reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward,
        cpu_offload=type(offload_policy).__name__ == "CPUOffloadPolicy",
        pin_memory=getattr(offload_policy, "pin_memory", True),
        backward_prefetch="BACKWARD_PRE",
        device=_device_of(mesh),
        **native(policy),
    )
    ignored = set(map(id, ignored_params or ()))
    unit, of = _make_unit(modules, ignored, param_init_fn, ranks, shard_placement_fn, options)
    for each in modules:
        each._fsdp_unit, each._fsdp_output_dtype = unit, policy.output_dtype
        each._fsdp_rows = of  # which lives as long as they do
        each._fsdp_wants_sync, each._fsdp_manual = True, False
        # torch's replicate() leaves out what this names, and its parameters.
        vars(each).setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
        each.__class__ = type(f"FSDP{type(each).__name__}", (FSDPModule, type(each)), {})
    return module
