# SPDX-License-Identifier: BSD-3-Clause
"""The parameters of a unit of `fully_shard`, which keep their shape.

A parameter is a DTensor whose local tensor is the engine's shard of it. While its unit computes,
the modules have the engine's own tensor in its place, which is whole then: in forward, and in
backward for what a checkpoint computes again. Gradients go to the DTensor as soon as the engine has
reduced them.
"""

import contextlib
import dataclasses
import functools
import weakref

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import optimizer as _optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from muster import _C
from muster.nn.modules_in_use import is_dtensor, tensors_in
from muster.tensor._meshes import TorchMesh

_of_unit = weakref.WeakKeyDictionary()  # weakly: rows reach their unit by its modules
# From a parameter's id. Nothing of this is on the parameter, which programs pickle and copy, and
# which torch exchanges with another where it has no weak references.
_with_parameter = weakref.WeakValueDictionary()


def refuse(text):
    """Raises what bad arguments raise."""
    raise _C.DistArgumentError(f"fully_shard: {text}")


def rows_of(unit):
    """The `UnitRows` of a unit of `fully_shard`; None for a wrapper's."""
    known = _of_unit.get(unit)
    return None if known is None else known()


def place_of(parameter):
    """(unit, number there) of a parameter that `fully_shard` has divided; else None."""
    of = _with_parameter.get(id(parameter))
    return None if of is None else of.place_of(parameter)


@dataclasses.dataclass
class Member:
    """A parameter before it is divided, and where its modules have it."""

    name: str
    given: torch.nn.Parameter  # None afterwards: one of tensor parallelism has memory of its own
    places: list  # (module, attribute)
    dim: int = 0  # along which it is divided
    leaf: torch.Tensor = None  # the engine's
    given_spec: DTensorSpec = None  # of a DTensor of tensor parallelism


def members_of(modules, ignored, in_other_units, placement_of, mesh, ranks):
    """Those of `modules` and of the modules inside that no unit has. `in_other_units(module)` tells
    whether a module has a unit of its own; `ranks`: how many divide a parameter.
    """
    found, seen = {}, set()

    def visit(part, path):
        seen.add(id(part))
        for name, each in part._parameters.items():
            if each is None or id(each) in ignored:
                continue
            of = found.setdefault(id(each), Member(path + name, each, []))
            of.places.append((part, name))
        for name, child in part._modules.items():
            if child is not None and id(child) not in seen and not in_other_units(child):
                visit(child, f"{path}{name}.")

    for number, module in enumerate(modules):
        if id(module) not in seen:
            visit(module, "" if len(modules) == 1 else f"{number}.")
    for each in found.values():
        _prepare(each, placement_of, mesh)
        if each.leaf.is_complex() and each.leaf.dim() == 1 and len(each.leaf) % ranks:
            refuse(
                f"{each.name} is complex, and its {len(each.leaf)} elements do not divide by "
                f"{ranks} ranks, which torch's optimizers need: give it a multiple of that, or "
                "another dimension"
            )
    return list(found.values())


def _prepare(member, placement_of, mesh):
    given = member.given
    if place_of(given) is not None:
        refuse(
            f"{member.name} is shared with a unit that has it already: shard the modules that "
            "share it as one, fully_shard([one, other])"
        )
    if getattr(given, "_muster_replaced_by", None) is not None:
        refuse(f"{member.name} is a parameter that another unit has taken: its module was changed")
    if given._backward_hooks:
        refuse(
            f"{member.name} has a hook on its gradient, which belongs to the whole parameter: "
            "register it after sharding, where it gets the averaged DTensor"
        )
    if is_traceable_wrapper_subclass(given) and not is_dtensor(given):
        refuse(
            f"{member.name} is a {type(given).__name__}, whose values are in other tensors: only "
            "plain parameters are gathered, and extensions of all_gather are not called"
        )
    if given.dim() == 0:
        refuse(f"{member.name} has no dimension to divide: give it the shape (1,), or ignore it")
    placement = placement_of(given) if placement_of is not None else None
    if placement is not None and type(placement) is not Shard:
        refuse(
            f"shard_placement_fn gave {placement!r} for {member.name}: it gives a Shard(dim) or "
            "None"
        )
    dim = 0 if placement is None else placement.dim
    if not -given.dim() <= dim < given.dim():
        refuse(f"{member.name} has {given.dim()} dimensions, and Shard({dim}) was asked for")
    member.dim = dim % given.dim()
    member.leaf = given
    if is_dtensor(given):
        _check_common_mesh(member, mesh)
        member.given_spec = given._spec
        if any(each.is_partial() for each in given.placements):
            refuse(f"{member.name} is a DTensor of partial sums, which cannot be divided")
        member.leaf = torch.nn.Parameter(given.to_local().detach(), given.requires_grad)


def _check_common_mesh(member, mesh):
    theirs = member.given.device_mesh
    if (
        mesh is None
        or theirs._get_root_mesh() != mesh._get_root_mesh()  # torch may keep an equal one
        or not mesh.mesh_dim_names
        or not theirs.mesh_dim_names
    ):
        refuse(
            f"{member.name} is a DTensor over {theirs}: give fully_shard another part of the same "
            "mesh with names, as mesh['dp'] beside mesh['tp']"
        )
    shared = set(mesh.mesh_dim_names) & set(theirs.mesh_dim_names)
    if shared:
        refuse(f"{member.name} is divided over {sorted(shared)} of the mesh already")


class _End:
    """Called, or else dropped, as a backward pass ends. Autograd calls back after a pass without
    error alone, but it drops what it would have called after each.
    """

    def __init__(self, leave):
        self._leave = leave

    def __call__(self):
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    __del__ = __call__


class UnitRows:
    """What the modules of one unit show. Backward calls it on autograd's threads, under the unit's
    lock; nothing here takes a lock.
    """

    def __init__(self, unit, members, mesh, shards):
        self._unit = weakref.ref(unit)
        self._members = members
        self.shards = [unit.shard(index) for index in range(len(members))]
        self._versions = [0] * len(members)
        self._storages = [None] * len(members)  # of the DTensors: empty, each another
        self._numbers = {}  # by id; also of parameters that were
        self._depth, self._held, self._in_backward = 0, False, False
        self._backward_number = 0
        self.parameters = [
            self._made(index, each, mesh, shards) for index, each in enumerate(members)
        ]
        self._hide()
        weak = _of_unit[unit] = weakref.ref(self)
        unit.set_gradient_sink(lambda index, reduced: weak()._take_gradient(index, reduced))
        for owner in {id(owner): owner for each in members for owner, _ in each.places}.values():
            owner.register_state_dict_pre_hook(functools.partial(_before_state, weak))
            owner.register_load_state_dict_pre_hook(functools.partial(_before_state, weak))
        _watch_optimizers()

    # ---- the DTensors

    def _made(self, index, member, mesh, shards):
        local, given = self.shards[index], member.given
        placements, of = [Shard(member.dim) if shards else Replicate()], mesh
        if member.given_spec is not None:
            theirs = member.given_spec
            factor = theirs.num_shards_map[member.dim]
            if factor > 1 and shards:
                placements = [_StridedShard(member.dim, split_factor=factor)]
            placements += theirs.placements
            of = TorchMesh._concatenate([mesh, theirs.mesh])
            meta = theirs.tensor_meta
        else:
            sizes = torch.Size(self._unit().sizes_of(index))
            strides = torch.empty(sizes, device="meta").stride()
            meta = TensorMeta(sizes, strides, local.dtype)
        placements = [Replicate()] * (of.ndim - len(placements)) + placements
        spec = DTensorSpec(of, tuple(placements), tensor_meta=meta)
        made = torch.nn.Parameter(
            DTensor(local, spec, requires_grad=False), requires_grad=given.requires_grad
        )
        made._local_tensor = local  # not the alias that Parameter() makes
        for name, value in vars(given).items():
            if not name.startswith("_"):
                setattr(made, name, value)  # what a program has noted on it
        self._own(index, made)
        hooks = getattr(given, "_post_accumulate_grad_hooks", None)
        for hook in list((hooks or {}).values()):
            made.register_post_accumulate_grad_hook(hook)
        if hooks:
            hooks.clear()
        given._muster_replaced_by = member.name
        if member.leaf is not given:
            member.leaf._muster_replaced_by = member.name
        member.given = None
        return made

    def _own(self, index, parameter):
        _with_parameter[id(parameter)] = self
        self._numbers[id(parameter)] = index
        self._storages[index] = parameter.untyped_storage()  # alive, so that no other has its place
        self._versions[index] = parameter._version

    def place_of(self, parameter):
        """(unit, number there), or None: one that is no longer here may share its id with this."""
        index, unit = self._numbers[id(parameter)], self._unit()
        known = unit is not None and self.parameters[index] is parameter
        return (unit, index) if known else None

    # ---- what modules have

    def _hide(self):
        for parameter, member in zip(self.parameters, self._members, strict=True):
            for owner, name in member.places:
                owner._parameters[name] = parameter

    def _show(self):
        for member in self._members:
            whole = member.leaf
            if member.given_spec is not None:
                spec = member.given_spec
                with torch.enable_grad():
                    whole = DTensor.from_local(
                        member.leaf,
                        spec.mesh,
                        spec.placements,
                        run_check=False,
                        shape=spec.shape,
                        stride=spec.stride,
                    )
            for owner, name in member.places:
                owner._parameters[name] = whole

    def _settle(self):
        if self._depth == 0 and not self._held and not self._in_backward:
            self._hide()

    def ready(self):
        """Before the engine gathers: takes over what has been done to the parameters since."""
        if self._depth or self._held or self._in_backward:
            return
        changed = []
        try:
            self._take_changes(changed)
        finally:  # also of those before one that is refused, which are known from now on
            increment_version(changed)

    def _take_changes(self, changed):
        """Adds the shards that have changed."""
        storage_id = torch._C._storage_id
        # A unit may have thousands of parameters: what is as it was takes few looks.
        for index, (parameter, shard, storage, member) in enumerate(
            zip(self.parameters, self.shards, self._storages, self._members, strict=True)
        ):
            for owner, name in member.places:
                if owner._parameters.get(name) is not parameter:
                    parameter = self._current(index, member)
                    storage = self._storages[index]
                    break
            if parameter._local_tensor is not shard:
                self._take_values(index, member, parameter)
            elif storage_id(parameter) != storage._cdata:
                self._storages[index] = parameter.untyped_storage()
                refuse(
                    f"{member.name}.data was assigned, which a DTensor does not take: it has its "
                    "former values; copy into it (with torch.no_grad(): parameter.copy_(...))"
                )
            version = parameter._version
            if version != self._versions[index]:
                changed.append(shard)
                self._versions[index] = version
            if member.leaf.requires_grad != parameter.requires_grad:
                member.leaf.requires_grad_(parameter.requires_grad)

    def _current(self, index, member):
        """The parameter that its modules have now: load_state_dict(assign=True) puts another."""
        mine = self.parameters[index]
        others = [
            owner._parameters.get(name)
            for owner, name in member.places
            if owner._parameters.get(name) is not mine
        ]
        new = others[0]
        if not (
            is_dtensor(new)
            and isinstance(new, torch.nn.Parameter)
            and new._spec == mine._spec
            and all(each is new for each in others)
        ):
            refuse(
                f"{member.name} was replaced by assignment since its module was sharded; copy into "
                "it (with torch.no_grad(): parameter.copy_(...)), or load a state_dict"
            )
        self.parameters[index] = new
        self._own(index, new)
        self._versions[index] = -1
        for owner, name in member.places:
            owner._parameters[name] = new
        return new

    def _take_values(self, index, member, parameter):
        """After to_empty(): the values go where the engine has them."""
        local, shard = parameter._local_tensor, self.shards[index]
        if local.shape != shard.shape or local.dtype != shard.dtype or local.device != shard.device:
            refuse(
                f"{member.name} was {list(shard.shape)} of {shard.dtype} on {shard.device} on this "
                f"rank and is {list(local.shape)} of {local.dtype} on {local.device}: convert a "
                "module before it is sharded"
            )
        with torch.no_grad():
            shard.copy_(local)
        parameter._local_tensor = shard
        self._storages[index] = parameter.untyped_storage()

    def name_of_former(self, parameter):
        """If another has the place of `parameter`, which has the shard still; else None."""
        index = self._numbers[id(parameter)]
        if not is_dtensor(parameter) or parameter._local_tensor is not self.shards[index]:
            return None  # another tensor may have the id by now
        member = self._members[index]
        is_former = self.parameters[index] is not parameter or (
            not (self._depth or self._held or self._in_backward)
            and any(owner._parameters.get(name) is not parameter for owner, name in member.places)
        )
        return member.name if is_former else None

    def shard_of(self, parameter):
        """The engine's tensor of one of its parameters; None as `place_of`."""
        index = self._numbers[id(parameter)]
        return self.shards[index] if self.parameters[index] is parameter else None

    @contextlib.contextmanager
    def in_forward(self):
        """While it lasts the modules have whole parameters."""
        self._depth += 1
        try:
            if self._depth == 1:
                self._show()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._held = False
            self._settle()

    def follow(self, outputs):
        """Backward through `outputs` shows whole parameters until it ends."""
        if torch.is_grad_enabled():
            for each in tensors_in(outputs, []):
                if each.requires_grad:
                    each.register_hook(self._enter_backward)

    def _enter_backward(self, _):
        if not self._in_backward:
            self._in_backward = True
            self._backward_number += 1
            self._show()
            leave = functools.partial(self._leave_backward, self._backward_number)
            torch.autograd.Variable._execution_engine.queue_callback(_End(leave))

    def _leave_backward(self, number):
        if number == self._backward_number:  # else reset() has been, and another pass goes on
            self._in_backward = False
            self._settle()

    def hold(self):
        """unshard() has made them whole."""
        self._held = True
        self._show()

    def let_go(self):
        self._held = False
        self._settle()

    def reset(self):
        """After an exception."""
        self._depth, self._held, self._in_backward = 0, False, False
        self._hide()

    def before_state(self):
        if self._depth:
            refuse("a state_dict is taken and loaded between passes, and a unit's forward goes on")
        if not self._held and not self._in_backward:
            self.ready()
            return
        if self._held and not self._in_backward:
            self._unit().reshard()
        self._held = self._in_backward = False
        self._hide()

    # ---- gradients

    def _take_gradient(self, index, reduced):
        parameter = self.parameters[index]
        spec = parameter._spec
        if reduced.dtype != spec.tensor_meta.dtype:
            reduced = reduced.to(spec.tensor_meta.dtype)
        # Without __init__, which costs more than all else here.
        average = DTensor.__new__(DTensor, reduced, spec, requires_grad=False)
        if parameter._backward_hooks:
            for hook in list(parameter._backward_hooks.values()):
                changed = hook(average)
                average = average if changed is None else changed
        former = parameter.grad
        if former is None:
            parameter.grad = average
        else:
            if not is_dtensor(former) or (
                former._spec is not spec
                and (former.placements, former.device_mesh) != (spec.placements, spec.mesh)
            ):
                refuse(
                    f"{self._members[index].name}.grad was set to what is no DTensor divided as "
                    "the parameter is: this pass's average cannot be added to it"
                )
            with torch.no_grad():
                former._local_tensor.add_(average._local_tensor)
        if self._held and not self._depth:
            self.let_go()
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            for hook in list(hooks.values()):
                hook(parameter)

    @contextlib.contextmanager
    def with_gradients(self):
        """While it lasts the engine's tensors have the gradients, for its norms."""
        given = []
        try:
            for member, parameter in zip(self._members, self.parameters, strict=True):
                if parameter.grad is not None and member.leaf.grad is None:
                    member.leaf.grad = parameter.grad._local_tensor
                    given.append(member.leaf)
            yield
        finally:
            for each in given:
                each.grad = None

    def check_between_passes(self):
        """For what looks at gradients, which belong to the DTensors."""
        is_shown = self._depth or self._held or self._in_backward
        if is_shown and any(each.grad is not None for each in self.parameters):
            refuse(
                f"clip_grad_norm_ while {self._members[0].name} and others of its unit are whole: "
                "call it between passes, and reshard() after unshard()"
            )

    @property
    def is_tensor_parallel(self):
        return any(each.given_spec is not None for each in self._members)

    # ---- states

    def whole(self, index, gathered):
        """The whole of parameter `index`, which the engine has gathered over its own group."""
        spec = self._members[index].given_spec
        if spec is None:
            return gathered
        return DTensor.from_local(
            gathered,
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=spec.shape,
            stride=spec.stride,
        ).full_tensor()

    def sizes_of(self, index):
        return list(self.parameters[index].shape)

    def like(self, index, local):
        """A DTensor divided as parameter `index` is."""
        spec = self.parameters[index]._spec
        meta = TensorMeta(spec.shape, spec.stride, local.dtype)
        return DTensor(
            local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False
        )

    def part_of(self, index, whole):
        """This rank's part of a whole value, as a DTensor."""
        spec = self._members[index].given_spec
        whole = whole.to(self.shards[index].device)
        if spec is not None:
            whole = _part(whole, spec)
        return self.like(index, self._unit().shard_of(index, whole).clone())


def _part(whole, spec):
    """The part of `whole` that a DTensor of `spec` has here. Talks to nobody."""
    for dim, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            pieces = placement._split_tensor(
                whole, spec.mesh.size(dim), with_padding=False, contiguous=True
            )[0]
            whole = pieces[spec.mesh.get_coordinate()[dim]]
    return whole


def _before_state(weak, *_):
    rows = weak()
    if rows is not None:
        rows.before_state()


# ---- optimizers


def _check_parameters(optimizer, *_):
    for group in optimizer.param_groups:
        for each in group["params"]:
            name = getattr(each, "_muster_replaced_by", None)
            if name is not None:
                refuse(
                    f"an optimizer has {name} as it was before fully_shard, which has replaced it "
                    "by a DTensor: make the optimizer after sharding, of model.parameters()"
                )
            of = _with_parameter.get(id(each))
            name = None if of is None else of.name_of_former(each)
            if name is not None:
                refuse(
                    f"an optimizer has {name} as it was before load_state_dict(assign=True) or an "
                    "assignment replaced it: make the optimizer afterwards, or load without assign"
                )


def _note_step(optimizer, *_):
    """The engine's whole values are old: DTensor's operators do not count as changes of the local
    tensor, and one that changes several counts as a change of none.
    """
    changed = []
    for group in optimizer.param_groups:
        for each in group["params"]:
            of = _with_parameter.get(id(each))
            if of is not None:
                changed.append(of.shard_of(each))
    increment_version([each for each in changed if each is not None])


@functools.cache
def _watch_optimizers():
    _optimizer.register_optimizer_step_pre_hook(_check_parameters)
    _optimizer.register_optimizer_step_post_hook(_note_step)
