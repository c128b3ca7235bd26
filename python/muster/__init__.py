# SPDX-License-Identifier: BSD-3-Clause
"""muster: torch.distributed's interface on an engine of its own. `import muster as dist`.

Names, arguments and defaults are torch.distributed's; docs/user/python.md says what is here and
where it differs. `muster.torch` registers the same engine as a backend of stock torch.
"""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    import sys as _sys

    raise ImportError(
        f"muster needs torch, which {_sys.executable} does not have; in a clone `make build` "
        "installs it for .venv/bin/python (`make demo` needs LibTorch alone)"
    ) from error

from ._build import TORCH_VERSION as _BUILT_FOR
from ._build import VERSION as __version__  # noqa: F401

if _torch.__version__.split("+")[0] != _BUILT_FOR:
    raise ImportError(
        f"this muster was built for torch {_BUILT_FOR}, and torch {_torch.__version__} is "
        "installed: the two share C++ classes and must fit. "
        f"Install torch {_BUILT_FOR}, or build muster again with this torch (pip install "
        "--no-build-isolation --force-reinstall muster-dist)."
    )

from . import (  # noqa: E402
    _failure,  # noqa: F401  the other ranks are told why this process fails
    _modules,
    hooks,  # noqa: F401  gives groups the methods that register hooks
    process_group,  # noqa: F401  gives groups their methods
)
from ._C import (
    DebugLevel,
    DeviceMesh,
    DistArgumentError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistributedBackendOptions,
    DistStoreError,
    EtcdStore,
    FileStore,
    GradBucket,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupNCCL,
    QueueEmptyError,
    ReduceOp,
    Request,
    SpawnError,
    Store,
    TCPStore,
    Work,
    _make_nccl_premul_sum,
    abort_process_group,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    destroy_process_group,
    empty_shared,
    gather,
    grow_group,
    in_shared_memory,
    init_device_mesh,
    irecv,
    isend,
    monitored_barrier,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_coalesced,
    reduce_scatter_tensor,
    scatter,
    send,
    set_debug_level,
    set_debug_level_from_env,
    set_timeout,
    shared_allocator_stats,
    split_group,
    trim_shared_allocator,
    use_shared_allocator,
)
from ._lookups import (
    get_backend,
    get_debug_level,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
)
from .backends import ProcessGroupBackend
from .names import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    Backend,
    GroupMember,
    P2POp,
    _all_gather_base,
    _reduce_scatter_base,
    all_gather_single,
    batch_isend_irecv,
    breakpoint,
    default_pg_timeout,
    gather_into_tensor,
    gather_single,
    get_backend_config,
    get_default_backend_for_device,
    get_node_local_rank,
    get_pg_count,
    group,
    is_available,
    is_backend_available,
    is_xccl_available,
    load_backend_plugin,
    record_comm,
    reduce_op,
    reduce_scatter_single,
    supports_complex,
)
from .objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from .options import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BackendConfig,
    BarrierOptions,
    BroadcastOptions,
    BuiltinCommHookType,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from .rendezvous import (
    init_process_group,
    register_rendezvous_handler,
    rendezvous,
    shrink_group,
)
from .spawning import spawn

_modules.install()

__all__ = [
    "AllToAllOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "BuiltinCommHookType",
    "DebugLevel",
    "DeviceMesh",
    "DistArgumentError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistributedBackendOptions",
    "EtcdStore",
    "FileStore",
    "GatherOptions",
    "GradBucket",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupBackend",
    "ProcessGroupNCCL",
    "QueueEmptyError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "Request",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "ScatterOptions",
    "SpawnError",
    "Store",
    "TCPStore",
    "Work",
    "_all_gather_base",
    "_make_nccl_premul_sum",
    "_reduce_scatter_base",
    "abort_process_group",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "empty_shared",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "grow_group",
    "in_shared_memory",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "load_backend_plugin",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "record_comm",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "set_timeout",
    "shared_allocator_stats",
    "shrink_group",
    "spawn",
    "split_group",
    "supports_complex",
    "trim_shared_allocator",
    "use_shared_allocator",
]


def __getattr__(name):
    # Names that few programs use are imported when they are asked for.
    import importlib

    if name in (
        "algorithms",
        "autograd",
        "checkpoint",
        "device_mesh",
        "distributed",
        "distributed_c10d",
        "elastic",
        "fsdp",
        "launcher",
        "nn",
        "optim",
        "rpc",
        "tensor",
    ):
        return importlib.import_module("." + name, __name__)
    if name == "GroupName":
        return importlib.import_module(".distributed_c10d", __name__).GroupName
    if name in _modules.REFUSED:
        raise AttributeError(f"there is no muster.{name}: {_modules.REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
