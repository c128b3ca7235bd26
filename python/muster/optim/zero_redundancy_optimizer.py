# SPDX-License-Identifier: BSD-3-Clause
"""ZeroRedundancyOptimizer: an optimizer whose state is divided among the ranks (Rajbhandari et al.,
"ZeRO", SC 2020, first stage).
"""

from itertools import count

import torch
from torch.utils import _pytree

import muster as dist
from muster import _C
from muster.algorithms.join import Join, Joinable, JoinHook
from muster.nn.modules_in_use import refuse_dtensors

__all__ = ["ZeroRedundancyOptimizer"]


def _settings(group):
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _copy_settings(source, target):
    for one, other in zip(source.param_groups, target.param_groups):
        other.update(_settings(one))


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
        self._in_closure = False
        self._owners = _C._ParameterOwners(self.process_group, parameters_as_bucket_view)
        numbered = enumerate(each for of in self._parameters() for each in of)
        refuse_dtensors("ZeroRedundancyOptimizer: parameters", numbered)
        self.optim = optimizer_class(self._divided(), **defaults)
        self.defaults = self.optim.defaults
        _copy_settings(self.optim, self)  # defaults of the class

    # ---- what is seen of it ----

    @property
    def state(self):
        """The state of this rank's own parameters."""
        return None if self.optim is None else self.optim.state

    @state.setter
    def state(self, state):
        if self.optim is not None:
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
        # A scheduler's step is the original's.
        left_out = ("process_group", "_join", "_owners", "step")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state):
        super().__setstate__({**state, "process_group": dist.group.WORLD})
        self._owners = _C._ParameterOwners(self.process_group, self.parameters_as_bucket_view)
        self._owners.divide(self._parameters(), self.world_size)

    # ---- who has what ----

    def _parameters(self):
        return [group["params"] for group in self.param_groups]

    def _divided(self):
        """This rank's part of the groups; all members call it alike."""
        self._owners.compare(self._parameters())
        self._owners.divide(self._parameters(), self.world_size)
        parts = self._owners.part_of(self.rank)
        return [
            {**_settings(group), "params": part} for group, part in zip(self.param_groups, parts)
        ]

    def rank_of(self, parameter):
        """The rank (of the group) that keeps a parameter of this optimizer."""
        return self._owners.rank_of(parameter)

    def add_param_group(self, param_group):
        """As the undivided optimizer's; all members call it alike."""
        super().add_param_group(param_group)
        if self.optim is None:
            return
        self.optim.add_param_group(self._divided()[-1])
        _copy_settings(self.optim, self)

    # ---- the step ----

    def step(self, closure=None, **kwargs):
        """Updates this rank's parameters, then all members meet to send theirs. Returns what the
        closure gives, where there is one. With overlap_with_ddp backward has taken the step: does
        nothing.
        """
        if self.overlap_with_ddp:
            return None
        Join.notify_join_context(self)
        self._in_closure = False

        def watched():
            self._in_closure = True
            loss = closure()
            self._in_closure = False
            return loss

        loss = self._update(watched if closure is not None else None, **kwargs)
        self._owners.share()
        return loss

    def _update(self, *closure, **kwargs):
        """The step of this rank's part. If it raises, the other ranks' steps do too."""
        _copy_settings(self, self.optim)
        try:
            loss = self.optim.step(*closure, **kwargs)
        except Exception as error:
            self._owners.fail_step(str(error), self._in_closure)
            raise
        _copy_settings(self.optim, self)  # a step may change them
        return loss

    @torch.no_grad()
    def _step_bucket(self, bucket, averaged):
        """The step for one bucket that has been averaged, at backward's end. Gives the averages
        back.
        """
        among = set(self._owners.begin_bucket(bucket, averaged))
        everything = [group["params"] for group in self.optim.param_groups]
        try:
            for group in self.optim.param_groups:
                group["params"] = [each for each in group["params"] if each in among]
            self._update()
        finally:
            for group, params in zip(self.optim.param_groups, everything):
                group["params"] = params
        return self._owners.end_bucket()

    # ---- checkpoints ----

    def consolidate_state_dict(self, to=0):
        """Collects the state of all members on rank `to` of the group. Every member calls it."""
        _copy_settings(self, self.optim)
        mine = _pytree.tree_map_only(
            torch.Tensor, lambda each: each.cpu(), self.optim.state_dict()["state"]
        )
        collected = [None] * self.world_size if self.rank == to else None
        dist.gather_object(mine, collected, group=self.process_group, group_dst=to)
        self._collected = collected

    def state_dict(self):
        """The whole optimizer as it was at the last `consolidate_state_dict`, as an undivided one
        gives it; either can load it. Raises DistError on a rank that it was not collected on.
        """
        if self._collected is None:
            name = dist.get_global_rank(self.process_group, self.rank)
            raise dist.DistError(
                f"ZeroRedundancyOptimizer: the state was not collected on rank {name}: call "
                "consolidate_state_dict(to=...) on all ranks before, and state_dict() on that rank"
            )
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = {}
        for rank, theirs in enumerate(self._collected):
            numbers = self._owners.numbers_of(rank)
            state.update((numbers[index], value) for index, value in theirs.items())
        numbers = count()
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in self.param_groups
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
        if [len(each["params"]) for each in groups] != list(map(len, self._parameters())):
            raise dist.DistArgumentError(
                "ZeroRedundancyOptimizer: the state is of other parameter groups than this "
                "optimizer has"
            )
        saved = [state_dict["state"].get(number) for each in groups for number in each["params"]]
        state = {
            index: saved[number]
            for index, number in enumerate(self._owners.numbers_of(self.rank))
            if saved[number] is not None
        }
        numbers = count()
        mine = [
            {**_settings(each), "params": [next(numbers) for _ in part]}
            for each, part in zip(groups, self._owners.part_of(self.rank))
        ]
        self.optim.load_state_dict({"state": state, "param_groups": mine})
        _copy_settings(self.optim, self)
        self._collected = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # ---- uneven inputs ----

    def join_hook(self, **kwargs):
        """For Join. A rank without inputs still updates its parameters, with the gradients that the
        others' inputs gave.
        """
        hook = JoinHook()
        if not self.overlap_with_ddp:
            hook.main_hook = lambda: self.step()
        return hook

    @property
    def join_device(self):
        """The device of the first parameter."""
        return self._owners.device

    @property
    def join_process_group(self):
        """The ranks that share the state."""
        return self.process_group
