"""ZeroRedundancyOptimizer: an optimizer whose state is divided among the ranks (Rajbhandari et al.,
"ZeRO", SC 2020, first stage).
"""

import torch
from torch.utils import _pytree

import muster as dist
from muster import _C
from muster.algorithms.join import Join, Joinable, JoinHook

__all__ = ["ZeroRedundancyOptimizer"]


class _StepAlone(JoinHook):
    """A rank without inputs still has its parameters to update, with the gradients that the others'
    inputs gave.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def main_hook(self):
        self._optimizer.step()


def _settings(group):
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """`optimizer_class(params, **defaults)`, each parameter's state and update on one rank, which
    sends the result to the others: a rank keeps about 1/n of what Adam and its like remember.
    Gradients must be the same on all ranks (DistributedDataParallel sees to it); then the weights
    are, bit for bit, what the undivided optimizer makes of them.

    params: tensors or parameter groups, the same shapes on every member of `process_group` (None:
    the default group), else a DistError on all. optimizer_class: any of torch.optim that treats
    each parameter by itself (so not LBFGS). parameters_as_bucket_view: a rank's parameters lie in
    one piece of memory and travel as one message. overlap_with_ddp: backward takes the step
    (`hook_with_zero_step` of muster.algorithms.ddp_comm_hooks.ddp_zero_hook), and `step` does
    nothing.

    Changes of `param_groups` (a learning rate, by hand or by a scheduler) count from the next step
    on. `defaults`, `state` and other attributes are those of this rank's part, `optim`;
    methods of `optimizer_class` are not there, for they would work on this rank's parameters alone.
    Hooks are called on every rank, with this optimizer. An update that raises on one rank raises on
    the others too; the group has then failed.

    copy.deepcopy and pickle need no other rank. They go for the default group only.
    """

    def __init__(
        self,
        params,
        optimizer_class,
        process_group=None,
        parameters_as_bucket_view=False,
        overlap_with_ddp=False,
        **defaults,
    ):
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise dist.DistArgumentError(
                "ZeroRedundancyOptimizer: LBFGS looks at all parameters together: it cannot be "
                "divided"
            )
        self.optim = None  # this rank's part
        super().__init__(params, defaults)
        self.process_group = dist.group.WORLD if process_group is None else process_group
        if not self.process_group:
            raise dist.DistArgumentError(
                "ZeroRedundancyOptimizer: this rank is no member of process_group; is a default "
                "group there?"
            )
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self._collected = None  # local state dicts by rank, where they were consolidated
        self._on_their_way = []
        self._compare()
        self._divide()
        self.optim = optimizer_class(
            [self._part(index) for index in range(len(self.param_groups))], **defaults
        )
        self.defaults = self.optim.defaults
        self._settings_from_local()

    # ---- what is seen of it ----

    @property
    def state(self):
        """The state of this rank's own parameters."""
        return self.__dict__["_state"] if self.optim is None else self.optim.state

    @state.setter
    def state(self, state):
        if self.optim is None:
            self.__dict__["_state"] = state
        else:
            self.optim.state = state

    def __getattr__(self, name):
        if not name.startswith("_") and self.__dict__.get("optim") is not None:
            value = getattr(self.optim, name)
            if not callable(value):
                return value
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __getstate__(self):
        if self.process_group != dist.group.WORLD:
            raise dist.DistArgumentError(
                "ZeroRedundancyOptimizer: one of a process_group other than the default "
                "group is not copied; load its state_dict() into another"
            )
        left_out = (
            "process_group",
            "_join",
            "_on_their_way",
            "step",
        )  # a scheduler's step is the original's
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state):
        super().__setstate__({**state, "process_group": dist.group.WORLD, "_on_their_way": []})

    # ---- who has what ----

    def _compare(self):
        mine = [
            f"parameter {i} of group {g}: {list(each.shape)} {each.dtype}"
            for g, group in enumerate(self.param_groups)
            for i, each in enumerate(group["params"])
        ]
        if not mine:
            raise dist.DistArgumentError("ZeroRedundancyOptimizer: there are no parameters")
        gathered = [None] * self.world_size
        dist.all_gather_object(gathered, mine, self.process_group)
        for rank, theirs in enumerate(gathered):
            if theirs == gathered[0]:
                continue
            line = next(
                (i for i, (a, b) in enumerate(zip(gathered[0], theirs)) if a != b),
                min(len(gathered[0]), len(theirs)),
            )
            ours, other = (
                lines[line] if line < len(lines) else "nothing more"
                for lines in (gathered[0], theirs)
            )
            names = [dist.get_global_rank(self.process_group, each) for each in (0, rank)]
            error = dist.DistError(
                f"ZeroRedundancyOptimizer: the ranks' parameters differ: '{ours}' on rank "
                f"{names[0]}, '{other}' on rank "
                f"{names[1]}; give the same parameters on every rank"
            )
            error.ranks, error.code = names[1:], "mismatch"
            raise error

    def _divide(self):
        elements = [[each.numel() for each in group["params"]] for group in self.param_groups]
        self._owners = _C._shard_parameters(elements, self.world_size)
        self._owner_of = {
            each: owner
            for group, owners in zip(self.param_groups, self._owners)
            for each, owner in zip(group["params"], owners)
        }
        self._buckets = self._lay_out() if self.parameters_as_bucket_view else []

    def _mine(self, index, rank):
        return [i for i, owner in enumerate(self._owners[index]) if owner == rank]

    def _part(self, index):
        group = self.param_groups[index]
        return {
            **_settings(group),
            "params": [group["params"][i] for i in self._mine(index, self.rank)],
        }

    @torch.no_grad()
    def _lay_out(self):
        """One piece of memory for each rank, dtype and device: (owner, memory, parameters, their
        places in it).
        """
        kinds = {}
        for parameter, owner in self._owner_of.items():
            kinds.setdefault((owner, parameter.dtype, parameter.device), []).append(parameter)
        buckets = []
        for (owner, dtype, device), parameters in kinds.items():
            memory = torch.empty(
                sum(each.numel() for each in parameters), dtype=dtype, device=device
            )
            places, at = [], 0
            for each in parameters:
                places.append(memory[at : at + each.numel()].view(each.shape))
                at += each.numel()
            buckets.append((owner, memory, parameters, places))
        self._take_back(buckets)
        return buckets

    @staticmethod
    @torch.no_grad()
    def _take_back(buckets):
        """Parameters that lie elsewhere (at first, and after they were given other memory) come to
        their places.
        """
        for _, _, parameters, places in buckets:
            for parameter, place in zip(parameters, places):
                if parameter.data_ptr() != place.data_ptr():
                    place.copy_(parameter.detach())
                    parameter.data = place

    def rank_of(self, parameter):
        """The rank (of the group) that keeps a parameter of this optimizer."""
        if parameter not in self._owner_of:
            raise dist.DistArgumentError(
                "ZeroRedundancyOptimizer: this tensor is none of its parameters"
            )
        return self._owner_of[parameter]

    def add_param_group(self, param_group):
        """As the undivided optimizer's; all members call it alike."""
        super().add_param_group(param_group)
        if self.optim is None:
            return
        self._compare()
        self._divide()
        self.optim.add_param_group(self._part(len(self.param_groups) - 1))
        self._settings_from_local()

    # ---- the step ----

    def _settings_to_local(self):
        for whole, mine in zip(self.param_groups, self.optim.param_groups):
            mine.update(_settings(whole))

    def _settings_from_local(self):
        """Defaults of the class, and what its step has changed."""
        for whole, mine in zip(self.param_groups, self.optim.param_groups):
            whole.update(_settings(mine))

    def step(self, closure=None, **kwargs):
        """Updates this rank's parameters, then all members meet to send theirs. Returns what the
        closure gives, where there is one. With overlap_with_ddp backward has taken the step: does
        nothing.
        """
        if self.overlap_with_ddp:
            return None
        Join.notify_join_context(self)
        self._settings_to_local()
        in_closure = False

        def watched():
            nonlocal in_closure
            in_closure = True
            loss = closure()
            in_closure = False
            return loss

        try:
            loss = self.optim.step(watched if closure is not None else None, **kwargs)
        except Exception as error:
            if in_closure:  # the others may well have failed alike: then the group goes on
                _C._refuse_step(self.process_group, str(error))
            else:
                self._end_calls(error)
            raise
        self._settings_from_local()
        self._share()
        return loss

    def _end_calls(self, error):
        """Fails the other ranks, which would wait for parameters that this rank will not send."""
        _C._end_calls(
            self.process_group,
            f"the step of a ZeroRedundancyOptimizer failed on rank {self._name()}: {error}",
        )

    def _name(self):
        return dist.get_global_rank(self.process_group, self.rank)

    def _send(self, tensor, owner):
        if tensor.numel() > 0:
            self._on_their_way.append(
                dist.broadcast(
                    tensor.detach(), group=self.process_group, async_op=True, group_src=owner
                )
            )

    def _wait_for_all(self):
        works, self._on_their_way = self._on_their_way, []
        for work in works:
            work.wait()

    @torch.no_grad()
    def _share(self):
        if self.parameters_as_bucket_view:
            self._take_back(self._buckets)
            for owner, memory, _, _ in self._buckets:
                self._send(memory, owner)
        else:
            for parameter, owner in self._owner_of.items():
                self._send(parameter, owner)
        self._wait_for_all()

    @torch.no_grad()
    def _step_bucket(self, bucket, averaged):
        """The step for one bucket that has been averaged, at backward's end. DDP sets the gradients
        after it: until then they lie in the bucket. Gives the averages back.
        """
        buffer = bucket.buffer()
        if averaged is not buffer:
            buffer.copy_(averaged.view(-1))
        mine, gradients_before, updated = [], [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            owner = self._owner_of.get(parameter)
            if owner is None:
                continue
            if parameter.is_complex():
                gradient = torch.view_as_complex(gradient)
            if gradient.dtype != parameter.dtype:
                raise dist.DistArgumentError(
                    "ZeroRedundancyOptimizer: with mixed_precision the parameters are not "
                    "themselves inside backward: "
                    "leave overlap_with_ddp out and call step() after it"
                )
            updated.append((parameter, owner))
            if owner == self.rank:
                mine.append(parameter)
                gradients_before.append(parameter.grad)
                parameter.grad = gradient
        self._settings_to_local()
        try:
            self._step_only(mine)
        except Exception as error:
            self._end_calls(error)
            raise
        self._settings_from_local()
        for parameter, gradient in zip(mine, gradients_before):
            parameter.grad = gradient
        for parameter, owner in updated:
            self._send(parameter, owner)
        if bucket.is_last():
            self._wait_for_all()
        return buffer

    def _step_only(self, parameters):
        among = set(parameters)
        everything = [group["params"] for group in self.optim.param_groups]
        try:
            for group in self.optim.param_groups:
                group["params"] = [each for each in group["params"] if each in among]
            self.optim.step()
        finally:
            for group, params in zip(self.optim.param_groups, everything):
                group["params"] = params

    # ---- checkpoints ----

    def consolidate_state_dict(self, to=0):
        """Collects the state of all members on rank `to` of the group. Every member calls it."""
        self._settings_to_local()
        mine = _pytree.tree_map_only(
            torch.Tensor, lambda each: each.cpu(), self.optim.state_dict()["state"]
        )
        collected = [None] * self.world_size if self.rank == to else None
        dist.gather_object(mine, collected, group=self.process_group, group_dst=to)
        self._collected = collected

    def _first_indices(self):
        """The number of each group's first parameter, as an undivided optimizer counts them."""
        first, firsts = 0, []
        for group in self.param_groups:
            firsts.append(first)
            first += len(group["params"])
        return firsts

    def _numbers_of(self, rank):
        """The whole's numbers of the parameters of a rank, in the order of its part."""
        return [
            first + i
            for index, first in enumerate(self._first_indices())
            for i in self._mine(index, rank)
        ]

    def state_dict(self):
        """The whole optimizer as it was at the last `consolidate_state_dict`, as an undivided one
        gives it; either can load it. Raises DistError on a rank that it was not collected on.
        """
        if self._collected is None:
            raise dist.DistError(
                f"ZeroRedundancyOptimizer: the state was not collected on rank {self._name()}: "
                "call "
                "consolidate_state_dict(to=...) on all ranks before, and state_dict() on that rank"
            )
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = {}
        for rank, theirs in enumerate(self._collected):
            numbers = self._numbers_of(rank)
            state.update((numbers[index], value) for index, value in theirs.items())
        groups = [
            {
                **{name: value for name, value in group.items() if name != "params"},
                "params": list(range(first, first + len(group["params"]))),
            }
            for group, first in zip(self.param_groups, self._first_indices())
        ]
        whole = {"state": dict(sorted(state.items())), "param_groups": groups}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, whole)
            whole = whole if changed is None else changed
        return whole

    def load_state_dict(self, state_dict):
        """Loads a state of an undivided optimizer or of `state_dict`, from any number of ranks, and
        keeps this rank's part. Every member loads the same. Raises ValueError where the parameter
        groups differ.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict["param_groups"]
        if [len(each["params"]) for each in groups] != [
            len(each["params"]) for each in self.param_groups
        ]:
            raise dist.DistArgumentError(
                "ZeroRedundancyOptimizer: the state is of other parameter groups than this "
                "optimizer has"
            )
        names = [number for each in groups for number in each["params"]]  # by our own count
        state = {
            index: state_dict["state"][names[number]]
            for index, number in enumerate(self._numbers_of(self.rank))
            if names[number] in state_dict["state"]
        }
        first, mine = 0, []
        for index, each in enumerate(groups):
            count = len(self._mine(index, self.rank))
            mine.append({**_settings(each), "params": list(range(first, first + count))})
            first += count
        self.optim.load_state_dict({"state": state, "param_groups": mine})
        self._settings_from_local()
        self._collected = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # ---- uneven inputs ----

    def join_hook(self, **kwargs):
        """For Join."""
        return JoinHook() if self.overlap_with_ddp else _StepAlone(self)

    @property
    def join_device(self):
        """The device of the first parameter."""
        return next(iter(self._owner_of)).device

    @property
    def join_process_group(self):
        """The ranks that share the state."""
        return self.process_group
