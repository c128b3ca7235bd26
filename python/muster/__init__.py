"""muster: torch.distributed's interface on an engine of its own. `import muster as dist`.

Names, arguments and defaults are torch.distributed's; docs/python.md says what is here and where it differs. `muster.torch` registers the
same engine as a backend of stock torch.
"""

import torch as _torch

from ._build import TORCH_VERSION as _BUILT_FOR
from ._build import VERSION as __version__

if _torch.__version__.split("+")[0] != _BUILT_FOR:
    raise ImportError(
        f"this muster was built for torch {_BUILT_FOR}, and torch {_torch.__version__} is installed: the two share C++ classes and must fit. "
        f"Install torch {_BUILT_FOR}, or build muster again with this torch (pip install --no-build-isolation --force-reinstall muster-dist)."
    )

from ._C import (
    DebugLevel,
    DeviceMesh,
    DistArgumentError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    FileStore,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
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
    get_backend,
    get_debug_level,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    in_shared_memory,
    init_device_mesh,
    init_process_group,
    irecv,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
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
    shrink_group,
    split_group,
    trim_shared_allocator,
    use_shared_allocator,
)
from .names import Backend, GroupMember, P2POp, batch_isend_irecv, breakpoint, group, is_available, reduce_op
from .objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from .spawning import spawn
