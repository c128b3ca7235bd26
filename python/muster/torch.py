"""muster's engine as a backend of stock torch: `import muster.torch`, then `torch.distributed.init_process_group("muster")`.

An installed muster needs no import: torch finds the backend by its entry point when the name is first used. `replace_gloo()` is for
programs whose backend name is fixed. CUDA tensors travel through pinned memory of the host.
docs/torch-backend.md has the details.
"""

import atexit
import datetime
import functools
import os
import sys

import muster  # the check of torch's version
from muster import _C

import torch.distributed as _dist
import torch.distributed.distributed_c10d as _c10d
from torch import device as _device
from torch.cuda import device_count as _gpus
from torch.nn.parallel import DistributedDataParallel as _DDP

__all__ = ["register", "replace_gloo"]


def _lend_buckets():
    """Lets DDP take its buckets' memory from the backend, which torch leaves off by default. Not where a GPU's backend would lend too."""
    if _gpus() == 0:
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")


def _create(name):
    def create(options, _backend_options):
        _lend_buckets()
        timeout = options.timeout
        return _C.create_torch_backend(
            name,
            options.store,
            options.group_rank,
            options.group_size,
            timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout),
            options.group_id,
            list(options.global_ranks_in_group),
        )

    return create


def register():
    """Makes `muster` a backend of torch.distributed. Importing this module does it; torch calls it by the entry point."""
    if "MUSTER" not in _dist.Backend._plugins:
        _dist.Backend.register_backend("muster", _create("muster"), extended_api=True, devices=["cpu", "cuda"])
        if hasattr(_c10d, "_create_shrunk_process_group"):
            _c10d._create_shrunk_process_group = _shrunk_as_custom(_c10d._create_shrunk_process_group)


def _shrunk_as_custom(create):
    """torch takes what is left of any group of CPU tensors for its own Gloo, and DDP then reads it as one."""

    @functools.wraps(create)
    def created(backend, remaining_ranks, metadata, is_default_group):
        group = create(backend, remaining_ranks, metadata, is_default_group)
        if backend.name() in ("muster", "gloo"):  # torch's own Gloo cannot shrink
            for device, name in _c10d.BackendConfig(metadata["backend_config"]).get_device_backend_map().items():
                if name == backend.name():
                    group._register_backend(_device(device), _dist.ProcessGroup.BackendType.CUSTOM, backend)
            group._set_default_backend(_dist.ProcessGroup.BackendType.CUSTOM)
        return group

    return created


def replace_gloo():
    """From now on torch.distributed's backend `gloo` is muster's engine, in this process. Call it before init_process_group.

    What DDP logs (`_get_ddp_logging_data`) reads as on gloo with its default options.
    """
    if _dist.is_initialized():
        raise RuntimeError("replace_gloo() comes too late: torch.distributed is initialised already")
    # Registered anew, its type becomes CUSTOM: torch then takes it for no ProcessGroupGloo.
    _dist.Backend.register_backend("gloo", _create("gloo"), extended_api=True, devices=["cpu", "cuda"])
    if not hasattr(_DDP._get_ddp_logging_data, "__wrapped__"):
        _DDP._get_ddp_logging_data = _logged_as_gloo(_DDP._get_ddp_logging_data)


def _logged_as_gloo(logging_data):
    @functools.wraps(logging_data)
    def logged(ddp):
        data = logging_data(ddp)
        if data.get("backend_name") == "custom" and _dist.get_backend(ddp.process_group) == "gloo":
            data["backend_name"] = "gloo"
            for name in ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"):
                data[name.lower()] = os.environ.get(name, "N/A")
            data["gloo_num_threads"] = 2  # what gloo has where nobody asks for another number
        return data

    return logged


@atexit.register
def _leave():
    # A program that ended without destroy_process_group: others may still read what this rank has sent. After an error nobody waits.
    if not hasattr(sys, "last_type"):
        _C.leave_torch_job(datetime.timedelta(seconds=10))


register()
