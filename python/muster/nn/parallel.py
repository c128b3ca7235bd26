# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel over muster's reducer, under torch.nn.parallel's names."""

import contextlib
import dataclasses

import torch
from torch.nn import DataParallel  # noqa: F401  threads of one process, as they are
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter
from torch.nn.parallel.scatter_gather import scatter_kwargs
from torch.utils import _pytree

import muster as dist
from muster import _C
from muster.algorithms.ddp_comm_hooks import default_hooks
from muster.algorithms.ddp_comm_hooks.default_hooks import NativeHook
from muster.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
    _OptimizersOfParameters,
)
from muster.algorithms.join import Join, Joinable, JoinHook
from muster.nn import sync_batch_norm
from muster.nn.modules_in_use import refuse_dtensors, tensors_in
from muster.options import BuiltinCommHookType

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "MixedPrecision",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
]


@dataclasses.dataclass
class MixedPrecision:
    """Forward and backward in a narrower type than the one that parameters are kept and updated in.
    A type of None casts nothing; only floating-point tensors are cast. Torch's _MixedPrecision will
    do as well.
    """

    param_dtype: torch.dtype | None = (
        None  #: of parameters from forward to the end of backward, and of forward's inputs
    )
    reduce_dtype: torch.dtype | None = None  #: what gradients travel as; None: param_dtype
    buffer_dtype: torch.dtype | None = None  #: of buffers, from the construction on
    keep_low_precision_grads: bool = False  #: gradients stay in param_dtype after backward
    cast_forward_inputs: bool = (
        True  #: floating-point tensors among forward's arguments become param_dtype
    )


class _Shadow(JoinHook):
    """A rank that has run out of inputs: makes the calls of the others' forward and backward."""

    def __init__(self, of_model):
        self._of_model = of_model

    def main_hook(self):
        self._of_model.main_hook()

    def post_hook(self, is_last_joiner):
        self._of_model.post_hook(is_last_joiner)


def _index_of(device):
    """Index of an accelerator, which is given by its index, as text or as a torch.device."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    if index is None:
        raise _C.DistArgumentError(
            f"DistributedDataParallel: {device!r} in device_ids needs an index, as cuda:0 has; "
            "device_ids is None for modules on the CPU"
        )
    return index


class DistributedDataParallel(torch.nn.Module, Joinable):
    """One copy of `module` on every rank, each fed its own part of the data, all kept the same.

    Every member of the group makes it, with modules of the same parameters and buffers (names,
    shapes, dtypes; else a DistError on all ranks shows the first difference). Rank 0's go to all.
    Every backward pass averages the gradients over the ranks, overlapped with the pass
    itself: when it returns they are there, the same bits on every rank, and any optimizer works as
    it does on one process. `state_dict` is the module's, with `module.` before the names. A pass in
    which all parameters are frozen has nothing to average.

    One rank alone may copy it (copy.deepcopy, pickle, torch.optim.swa_utils.AveragedModel). The
    copy is of the default group, without a communication hook, and makes no calls as long as it
    trains nothing. Its first forward that does is a construction: every rank makes it.

    device_ids, output_device: for a module on one accelerator; None on the CPU and for modules on
    several devices. broadcast_buffers: rank 0's buffers go to all before forward;
    forward_sync_buffers is torch's newer name for it. init_sync=False: the modules are known to be
    the same. process_group (or device_mesh, of one dimension): None is the default group.
    bucket_cap_mb: MiB of gradients that travel together; None is 25. find_unused_parameters:
    forward may leave parameters out. gradient_as_bucket_view: gradients alias the buckets.
    static_graph: every pass uses the same parameters as often as the first.
    delay_all_reduce_named_params, param_to_hook_all_reduce: those gradients travel together, after
    that one's. mixed_precision: a `MixedPrecision`. dim, check_reduction,
    skip_all_reduce_unused_params, batched_grad_copy and lazy_bucket_allocation are taken and change
    nothing.

    SyncBatchNorm modules inside become muster's, in place: `muster.nn.SyncBatchNorm`.

    Raises ValueError (DistArgumentError) for options that do not fit and for a module without a
    trained parameter; in forward, DistError for parameters that took no part in the last loss, by
    name, and for a module that was changed after it was wrapped. A rank that dies in backward makes
    backward raise DistBackendError on all others, with its number.
    """

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=None,
        init_sync=True,
        process_group=None,
        bucket_cap_mb=None,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
        static_graph=False,
        delay_all_reduce_named_params=None,
        param_to_hook_all_reduce=None,
        mixed_precision=None,
        device_mesh=None,
        skip_all_reduce_unused_params=False,
        bucket_cap_mb_list=None,
        batched_grad_copy=False,
        forward_sync_buffers=None,
        lazy_bucket_allocation=False,
    ):
        super().__init__()
        if bucket_cap_mb_list is not None:
            raise _C.DistArgumentError(
                "DistributedDataParallel: bucket_cap_mb_list is not there; bucket_cap_mb is one "
                "size for all buckets"
            )
        if device_mesh is not None:
            if process_group is not None:
                raise _C.DistArgumentError(
                    "DistributedDataParallel: give process_group or device_mesh, not both"
                )
            process_group = device_mesh.get_group()
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise _C.DistArgumentError(
                "DistributedDataParallel: delay_all_reduce_named_params and "
                "param_to_hook_all_reduce need to be set at the same time"
            )
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        refuse_dtensors(
            "DistributedDataParallel",
            ((name, each) for name, each in module.named_parameters() if name not in ignored),
        )
        sync_batch_norm.adopt(module)
        self.module = module
        self.dim = dim
        self.device_ids = None if device_ids is None else [_index_of(each) for each in device_ids]
        self.broadcast_buffers = (
            broadcast_buffers is not False and forward_sync_buffers is not False
        )
        self.forward_sync_buffers = self.broadcast_buffers
        self.bucket_bytes_cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * 1024 * 1024)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.output_device = output_device
        if output_device is None and self.device_ids:
            self.output_device = self.device_ids[0]
        self.parameters_to_ignore = ignored
        self._options = dict(
            device_ids=self.device_ids,
            output_device=output_device,
            broadcast_buffers=self.broadcast_buffers,
            init_sync=init_sync,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
        )
        self._requires_sync = True
        self._hook = None  # the state and the hook that were registered
        self._iterations = 0
        self._own_optimizers = None
        self._made_core = None
        self._made_core = self._make_core()
        devices = {each.device for each in self._present()}
        self.device, self.is_multi_device_module = self._present()[0].device, len(devices) > 1
        self.device_type = self.device.type
        self._take_over_optimizers()

    def _take_over_optimizers(self):
        """Takes over the optimizers of parameters that step in backward
        (torch.distributed.optim._apply_optimizer_in_backward).
        """
        stepped = [each for each in self._present() if hasattr(each, "_in_backward_optimizers")]
        if not stepped:
            return
        self._own_optimizers = _OptimizersOfParameters(stepped)
        state = _OptimizerHookState(self._own_optimizers, stepped)
        self.register_comm_hook(None, _hook_then_optimizer(default_hooks.allreduce_hook, state))

    def _named(self, tensors):
        return [
            (name, tensor)
            for name, tensor in tensors
            if name not in self.parameters_to_ignore and tensor is not None
        ]

    @property
    def _core(self):
        """The C++ half. A copy's is made by the first call that needs it, then collective."""
        if self._made_core is None:
            self._made_core = self._make_core()
            self._made_core.require_sync = self._requires_sync
        return self._made_core

    def _make_core(self):
        parameters = self._named(self.module.named_parameters())
        uninitialised = [
            name
            for name, each in parameters
            if isinstance(each, torch.nn.parameter.UninitializedParameter)
        ]
        if uninitialised:
            raise _C.DistArgumentError(
                f"DistributedDataParallel: {', '.join(uninitialised)}: a lazy module has no "
                "parameters yet; run a forward pass before wrapping it"
            )
        sparse = [
            each.weight
            for each in self.module.modules()
            if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse
        ]
        buffers = self._named(self.module.named_buffers())
        module, ignored = self.module, self.parameters_to_ignore

        def buffers_now():  # forward may have put others in their place
            return [each for name, each in module.named_buffers() if name not in ignored]

        return _C._DataParallelCore(
            type(self.module).__name__,
            parameters,
            buffers,
            sparse,
            self._options,
            buffers_now if buffers else None,
        )

    # ---- each iteration ----

    def forward(self, *inputs, **kwargs):
        """The module's own forward. Backward on the tensors among its results (also in lists,
        tuples, dicts and dataclasses) averages the gradients. With device_ids, tensors among the
        arguments that lie elsewhere are copied to the device first.
        """
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            if self._is_copy_that_trains_nothing():
                if self.device_ids:
                    inputs, kwargs = _pytree.tree_map_only(
                        torch.Tensor, lambda each: each.to(self.device), (inputs, kwargs)
                    )
                return self.module(*inputs, **kwargs)
            if self._join is not None and self._core.syncs:
                self._core.end_iteration()
            Join.notify_join_context(self)
            self._iterations += 1
            if self._own_optimizers is not None and torch.is_grad_enabled():
                self._own_optimizers.forget_gradients()
            self._core.before_forward(
                self._present() if torch.is_grad_enabled() else [], self._names
            )
            if self._core.changes_arguments():
                inputs, kwargs = _pytree.tree_map_only(
                    torch.Tensor, self._core.changed, (inputs, kwargs)
                )
            outputs = self.module(*inputs, **kwargs)
            self._core.after_forward(tensors_in(outputs, []))
            return outputs

    def _is_copy_that_trains_nothing(self):
        """Such a forward makes no calls to other ranks, and runs in full precision."""
        if self._made_core is not None:
            return False
        return not (torch.is_grad_enabled() and any(each.requires_grad for each in self._present()))

    def _present(self):
        if self.parameters_to_ignore:
            return [each for _, each in self._named(self.module.named_parameters())]
        return list(self.module.parameters())

    def _names(self):
        return [name for name, _ in self._named(self.module.named_parameters())]

    @property
    def process_group(self):
        """The ranks that train together. The model's own calls travel in a group of its own, of the
        same ranks.
        """
        group = self._options["process_group"]
        return dist.group.WORLD if group is None else group

    @property
    def require_backward_grad_sync(self):
        """Whether backward averages; False inside `no_sync`."""
        return self._requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on):
        self._requires_sync = on
        if self._made_core is not None:
            self._made_core.require_sync = on

    @contextlib.contextmanager
    def no_sync(self):
        """Inside of it backward adds gradients up on this rank only; the first backward pass of a
        forward made after it averages the sums.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- hooks ----

    def register_comm_hook(self, state, hook):
        """Sets the hook that runs for each bucket instead of averaging: one hook, before the first
        backward pass, on all ranks. `hook(state, bucket)`, bucket: GradBucket, starts the
        communication and returns a future of the tensor for the optimizer, as many elements as
        `bucket.buffer()`; muster.algorithms.ddp_comm_hooks has some. Its exceptions come out of
        backward. Raises TypeError for a hook that cannot be called, ValueError (DistArgumentError)
        for a second hook."""
        if isinstance(hook, NativeHook):
            self._core.register_comm_hook(hook.native(state))
        elif not callable(hook):
            raise TypeError("Communication hook must be callable.")
        else:
            self._core.register_comm_hook(lambda bucket: hook(state, bucket))
        self._hook = state, hook

    # ---- uneven inputs ----

    def join(
        self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False
    ):
        """A Join of this model alone. A rank that has run out of inputs gives zeros to the others'
        averages, which are divided by all ranks or, without divide_by_initial_world_size, by those
        that still have inputs; at the end the last ranks' weights go to all.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs):
        """For Join; `divide_by_initial_world_size` (True) as in `join`."""
        return _Shadow(self._core.join_hook(kwargs.get("divide_by_initial_world_size", True)))

    def end_of_inputs(self):
        """For Join: raises DistError where the last iteration was not finished."""
        self._core.end_iteration()

    @property
    def join_device(self):
        """The device of the first parameter."""
        return self.device

    @property
    def join_process_group(self):
        """The ranks that train together."""
        return self.process_group

    # ---- what else torch's has ----

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore):
        """Names of parameters and buffers to ignore; call it before the module is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate):
        """At debug level DETAIL, times are logged for the first ten iterations and then for each
        `sample_rate`th; 100 at first.
        """
        self._core.set_sample_rate(sample_rate)

    def _register_builtin_comm_hook(self, comm_hook_type):
        """A hook by its BuiltinCommHookType: as `default_hooks`' of that name, in C++."""
        hooks = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(None, hooks[BuiltinCommHookType(int(comm_hook_type))])

    def _register_fused_optim(self, optim, *args, optim_params=None, **kwargs):
        """Backward takes the step of an optimizer of that class (one that `as_functional_optim`
        knows), made with the rest of the arguments: each parameter's as soon as its gradient is
        averaged. optim_params: those that it steps; None: all. Raises ValueError for other classes,
        and (DistArgumentError) where there is a hook.
        """
        from torch.distributed.optim import as_functional_optim  # it takes a second to import

        made = as_functional_optim(optim, *args, **kwargs)
        params = None if optim_params is None else list(optim_params)
        state = _OptimizerHookState(made, params)
        hook = _hook_then_optimizer(default_hooks.allreduce_hook, state)
        self.register_comm_hook(None, hook)

    def _set_static_graph(self):
        """As the option of that name, before the first forward; where communication hooks are, they
        stay to be registered.
        """
        if self.static_graph:
            return
        if self._iterations:
            raise _C.DistArgumentError(
                "DistributedDataParallel: _set_static_graph comes before the first forward"
            )
        self.static_graph = self._options["static_graph"] = True
        self._made_core = self._make_core()
        self._made_core.require_sync = self._requires_sync
        if self._hook is not None:
            self.register_comm_hook(*self._hook)

    def _get_ddp_logging_data(self):
        """Its options and its buckets, by torch's names: text and numbers."""
        parameters = self._present()
        ids = self.device_ids or []
        return {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "module_name": type(self.module).__name__,
            "backend_name": self.process_group.name(),
            "device_ids": ", ".join(map(str, ids)),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.broadcast_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "is_multi_device_module": int(self.is_multi_device_module),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in parameters),
            "dtypes": ", ".join(
                sorted({str(each.dtype).removeprefix("torch.") for each in parameters})
            ),
            "bucket_sizes": ", ".join(map(str, self.bucket_bytes())),
            "has_rebuilt_buckets": int(self._core.buckets_rebuilt()),
            "comm_hook": "" if self._hook is None else getattr(self._hook[1], "__name__", "hook"),
            "iteration": self._iterations,
        }

    def scatter(self, inputs, kwargs, device_ids):
        """Arguments cut along `dim`, one part for each device, as DataParallel does: lists of
        arguments and of keyword arguments.
        """
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs, kwargs, device_id):
        """Arguments whose tensors lie on that device: a list of them, and one of keyword arguments,
        of one entry each.
        """
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
        moved = _pytree.tree_map_only(
            torch.Tensor, lambda each: each.to(device), (tuple(inputs), dict(kwargs))
        )
        return [moved[0]], [moved[1]]

    def gather(self, outputs, output_device):
        """Outputs of several devices, put together along `dim` on one."""
        return gather(outputs, output_device, dim=self.dim)

    def will_sync_module_buffers(self):
        """Whether the next forward sends rank 0's buffers to all."""
        has_buffers = bool(self._named(self.module.named_buffers()))
        return self.require_backward_grad_sync and self.broadcast_buffers and has_buffers

    def bucket_bytes(self):
        """Bytes of the buckets in their order; it changes once, at the forward after the first
        backward.
        """
        return self._core.bucket_bytes()

    def __getstate__(self):
        state = {name: value for name, value in self.__dict__.items() if name != "_join"}
        state["_made_core"] = state["_hook"] = state["_own_optimizers"] = None
        state["_options"] = dict(self._options, process_group=None)
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.device = self._present()[0].device  # torch.load may have put it elsewhere
