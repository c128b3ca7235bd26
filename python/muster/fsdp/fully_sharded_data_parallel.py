# SPDX-License-Identifier: BSD-3-Clause
"""`FullyShardedDataParallel`: a module around the one that is sharded."""

import contextlib

import torch

from muster import _C

from . import state_dict as states
from . import units
from .gradients import clip_grad_norm_
from .options import (
    BackwardPrefetch,
    FullStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,  # noqa: F401 torch has it here too
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    native,
)
from .wrap import as_call


class FullyShardedDataParallel(torch.nn.Module):
    """One model on all ranks, each fed its own part of the data, of which every rank keeps a share:
    1/n of the parameters, of their gradients and of what the optimizer keeps.

    auto_wrap_policy chooses the modules inside that become units of their own (`muster.fsdp.wrap`;
    a set of classes is one too). A unit's parameters are gathered when its forward begins and given
    back when it ends, gathered once more for its part of backward, and given back with the
    gradients, of which each rank keeps its shard of the averages. Between passes each parameter
    holds, in one dimension, the elements of it that lie on this rank; an optimizer made from
    `parameters()` after this works on those. Names are the module's own.

    process_group or device_mesh: None is the default group. sharding_strategy: a
    `ShardingStrategy`; the hybrid ones take a mesh of two dimensions, of which the first replicates
    and the second shares, or a tuple of the group that shares and the one that replicates; without
    them parameters are shared within each host. cpu_offload: `CPUOffload(True)`. mixed_precision: a
    `MixedPrecision`. sync_module_states: rank 0's values go to all first (torch's default is
    False). ignored_states, ignored_modules: stay whole; not sharded or averaged.
    device_id: the module is moved there first. Parts on the meta device get memory, and values by
    `param_init_fn(part)` or the part's `reset_parameters()`. backward_prefetch: when the unit
    that backward needs next begins to be gathered, None: when it is needed.
    forward_prefetch: the unit that came next in the last pass begins to be gathered in forward.
    limit_all_gathers and use_orig_params are taken and change nothing: no more than one unit is
    gathered ahead, and parameters are always the module's own.

    It is neither copied nor pickled.

    Collective, like forward and backward: every rank makes it, with the same module, else a
    DistError on all ranks shows the first difference. One thread at a time. Raises ValueError
    (DistArgumentError) for options that are not there. A rank that dies in backward makes backward
    raise DistBackendError on all others, with its number.
    """

    def __init__(
        self,
        module,
        process_group=None,
        sharding_strategy=None,
        cpu_offload=None,
        auto_wrap_policy=None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=None,
        ignored_modules=None,
        param_init_fn=None,
        device_id=None,
        sync_module_states=True,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=True,
        ignored_states=None,
        device_mesh=None,
    ):
        super().__init__()
        strategy = getattr(sharding_strategy, "name", sharding_strategy) or "FULL_SHARD"
        if strategy not in ShardingStrategy.__members__:
            units.refuse(
                f"sharding_strategy {strategy} is not there; "
                f"{', '.join(ShardingStrategy.__members__)} are"
            )
        hybrid = "HYBRID" in strategy
        if hybrid and process_group is None and device_mesh is None:
            process_group = units.groups_from(None, None, hybrid)
        group, replicas = units.groups_from(process_group, device_mesh, hybrid)
        if units.unit_of(module) is not None:
            units.refuse(f"this {type(module).__name__} is sharded already")
        if any(
            units.unit_of(each) is not None and not isinstance(each, FullyShardedDataParallel)
            for each in module.modules()
        ):
            units.refuse(
                "fully_shard was applied to a part of this module already: use one of the two for "
                "a model, or their states mix"
            )
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
        if device is not None and not any(each.is_meta for each in module.parameters()):
            module.to(device)
        ignored = set()
        for each in (*(ignored_modules or ()), *(ignored_states or ())):
            ignored.update(
                map(
                    id,
                    (*each.parameters(), *each.buffers())
                    if isinstance(each, torch.nn.Module)
                    else [each],
                )
            )
        if auto_wrap_policy is not None:
            options = dict(
                process_group=process_group,
                device_mesh=device_mesh,
                sharding_strategy=sharding_strategy,
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                forward_prefetch=forward_prefetch,
                mixed_precision=mixed_precision,
                param_init_fn=param_init_fn,
                device_id=device_id,
                sync_module_states=sync_module_states,
            )
            _wrap_inside(module, as_call(auto_wrap_policy), options, ignored)
        self._fsdp_wrapped_module = module
        self._fsdp_unit = units.make_unit(
            module,
            ignored,
            group,
            param_init_fn,
            replicas=replicas,
            shards=strategy != "NO_SHARD",
            reshard_after_forward=strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"),
            cpu_offload=bool(getattr(cpu_offload, "offload_params", cpu_offload)),
            backward_prefetch=getattr(backward_prefetch, "name", backward_prefetch),
            forward_prefetch=forward_prefetch,
            sync_module_states=sync_module_states,
            device=device,
            **native(mixed_precision),
        )
        self._fsdp_state = (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), None)
        self.register_load_state_dict_pre_hook(_before_load)

    @property
    def module(self):
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == units.WRAPPED:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key):
        return self._fsdp_wrapped_module[key]

    def forward(self, *args, **kwargs):
        """The module's own, on its whole parameters. Backward on the tensors among its results
        (also in lists, tuples, dicts and dataclasses) gives each rank its shards of the averaged
        gradients.
        """
        with torch.autograd.profiler.record_function("FullyShardedDataParallel.forward"):
            return units.run(self._fsdp_unit, self._fsdp_wrapped_module, args, kwargs)

    @property
    def process_group(self):
        """The ranks that share the model, with NO_SHARD those that hold it. The model's own calls
        travel in a group of its own, of the same ranks.
        """
        unit = self._fsdp_unit
        return unit.replicas if unit.group.size() == 1 and unit.replicas else unit.group

    def check_is_root(self):
        """Whether no other unit was around this one in the last forward; before the first one,
        whether it may be so.
        """
        return self._fsdp_unit.was_root

    def apply(self, fn):
        """Collective: torch.nn.Module's, on whole parameters; this rank's changes count for its
        shards.
        """
        with states.whole_parameters(units.units_in(self), writeback=True):
            return super().apply(fn)

    def register_comm_hook(self, state, hook):
        """`hook(state, gradients, output)` in place of the reduce_scatter of all units, or with
        NO_SHARD `hook(state, gradients)` in place of their all_reduce, in place. It divides by the
        number of ranks, if anything is to. Not with hybrid strategies.
        """
        for unit in units.units_in(self):
            if unit.replicas and unit.group.size() > 1:
                units.refuse(
                    "register_comm_hook goes with strategies of one group, and this one is hybrid"
                )
            unit.set_divisor(1.0)
            if unit.replicas:
                unit.set_all_reduce(lambda gradients, group: hook(state, gradients))
            else:
                unit.set_reduce_scatter(lambda output, given, group: hook(state, given, output))

    def named_parameters(self, *args, **kwargs):
        """The module's names."""
        for name, each in super().named_parameters(*args, **kwargs):
            yield units.plain(name), each

    def named_buffers(self, *args, **kwargs):
        """The module's names."""
        for name, each in super().named_buffers(*args, **kwargs):
            yield units.plain(name), each

    @staticmethod
    def fsdp_modules(module, root_only=False):
        """Those inside of `module`, itself among them."""
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        return found[:1] if root_only else found

    @contextlib.contextmanager
    def no_sync(self):
        """Inside of it backward adds whole gradients up on this rank, which takes their memory; the
        first backward pass after it averages the sums. An optimizer's zero_grad does not reach
        them, the model's does.
        """
        of = units.units_in(self)
        before = [unit.require_sync for unit in of]
        for unit in of:
            unit.require_sync = False
        try:
            yield
        finally:
            for unit, was in zip(of, before):
                unit.require_sync = was

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Collective: `muster.fsdp.clip_grad_norm_` of this model. `torch.nn.utils.clip_grad_norm_`
        would see only this rank's shards.
        """
        return clip_grad_norm_(self, max_norm, norm_type)

    def zero_grad(self, set_to_none=True):
        """The module's own; gradients that wait on this rank to be averaged (`no_sync`) are dropped
        too.
        """
        super().zero_grad(set_to_none)
        for unit in units.units_in(self):
            unit.drop_gradients()

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module,
        recurse=True,
        writeback=True,
        rank0_only=False,
        offload_to_cpu=False,
        with_grads=False,
    ):
        """While it lasts, the parameters of the units inside of `module` are whole on every rank.
        writeback: what is changed in them on this rank counts for its shard. Collective.
        """
        if with_grads or offload_to_cpu:
            units.refuse("summon_full_params gives parameters where they are, without gradients")
        if rank0_only and writeback:
            units.refuse(
                "summon_full_params(rank0_only=True) goes with writeback=False: the other ranks "
                "keep their own shards"
            )
        of = units.units_in(module)
        with states.whole_parameters(of if recurse else of[:1], writeback):
            yield

    # ---- state ----

    @staticmethod
    def set_state_dict_type(
        module, state_dict_type, state_dict_config=None, optim_state_dict_config=None
    ):
        """Sets the form that `state_dict`, `load_state_dict` and `optim_state_dict` of the models
        inside of `module` give and take from now on: a `StateDictType` with its configs. Returns
        the one before.
        """
        kind = StateDictType[state_dict_type.name]
        if state_dict_config is None:
            state_dict_config = _CONFIGS[kind]()
        models = FullyShardedDataParallel.fsdp_modules(module)
        before = models[0]._fsdp_state if models else None
        for each in models:
            each._fsdp_state = (kind, state_dict_config, optim_state_dict_config)
        return before

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module, state_dict_type, state_dict_config=None, optim_state_dict_config=None
    ):
        """The same for as long as it lasts."""
        models = FullyShardedDataParallel.fsdp_modules(module)
        before = [each._fsdp_state for each in models]
        FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for each, state in zip(models, before):
                each._fsdp_state = state

    @staticmethod
    def get_state_dict_type(module):
        """The settings of `set_state_dict_type` for the models inside of `module`: a
        StateDictSettings. Raises ValueError (DistArgumentError) where there is none, or where they
        differ.
        """
        found = [each._fsdp_state for each in FullyShardedDataParallel.fsdp_modules(module)]
        if not found or any(each != found[0] for each in found):
            units.refuse("get_state_dict_type: the models inside have no one state dict type")
        return StateDictSettings(*found[0])

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        """The module's, by its own names. Whole parameters, as copies, on every rank or on rank 0:
        collective. Or this rank's shards (`state_dict_type`).
        """
        kind, config, _ = self._fsdp_state
        inner = self._fsdp_wrapped_module
        known = set(destination or ())
        whole = kind is StateDictType.FULL_STATE_DICT
        with (
            states.whole_parameters([self._fsdp_unit], writeback=False)
            if whole
            else contextlib.nullcontext()
        ):
            state = inner.state_dict(
                *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
            wanted = not whole or not config.rank0_only or self._fsdp_unit.is_first
            for name in [name for name in state if name not in known]:
                value = state[name]
                if not wanted:
                    del state[name]
                elif isinstance(value, torch.Tensor) and (whole or config.offload_to_cpu):
                    state[name] = value.detach().to(
                        "cpu" if config.offload_to_cpu else value.device, copy=True
                    )
        return state

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Each rank takes its shards of whole values, which it is given on every rank; or its own
        shards (`state_dict_type`). Whole values may come from any number of ranks. Raises
        RuntimeError for names and sizes that are not the module's.
        """
        if assign:
            units.refuse(
                "load_state_dict(assign=True) would put other tensors in the parameters' place"
            )
        return super().load_state_dict(state_dict, strict)

    optim_state_dict = staticmethod(states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(states.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(states.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(states.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(states.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(states.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(states.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(states.rekey_optim_state_dict)


_CONFIGS = {
    StateDictType.FULL_STATE_DICT: FullStateDictConfig,
    StateDictType.SHARDED_STATE_DICT: ShardedStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalStateDictConfig,
}


def _before_load(
    module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
):
    """A state saved under the wrapped module's names is loaded under the wrapper's; whole values
    give this rank's shards.
    """
    whole = (
        module._fsdp_state[0] is StateDictType.FULL_STATE_DICT and not module._fsdp_unit.is_summoned
    )
    places = units.parameters_by_name(module) if whole else {}
    inner = f"{prefix}{units.WRAPPED}."
    for name in [
        name for name in state_dict if name.startswith(prefix) and not name.startswith(inner)
    ]:
        value = state_dict.pop(name)
        unit, index = places.get(name[len(prefix) :]) or (None, None)
        if unit is module._fsdp_unit and isinstance(value, torch.Tensor):
            value = states.shard_or_complain(unit, index, value, error_msgs)
        state_dict[inner + name[len(prefix) :]] = value


def _wrap_inside(module, policy, options, ignored, wrapped=None):
    """Inner ones first. A module in several places is wrapped once."""
    wrapped = {} if wrapped is None else wrapped
    for name, child in list(module._modules.items()):
        if child is None or units.unit_of(child) is not None:
            continue
        if id(child) not in wrapped:
            if policy(child, True):
                _wrap_inside(child, policy, options, ignored, wrapped)
            chosen = policy(child, False)
            if not chosen or all(
                _C._is_sharded(each) or id(each) in ignored for each in child.parameters()
            ):
                continue
            own = dict(options, **chosen) if isinstance(chosen, dict) else options
            leaves = [
                each for each in (*child.parameters(), *child.buffers()) if id(each) in ignored
            ]
            wrapped[id(child)] = FullyShardedDataParallel(child, ignored_states=leaves, **own)
        setattr(module, name, wrapped[id(child)])
