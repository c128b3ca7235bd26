# SPDX-License-Identifier: BSD-3-Clause
"""muster's engine as a backend of stock torch: `import muster.torch`, then
`torch.distributed.init_process_group("muster")`.

An installed muster needs no import: torch finds the backend by its entry point when the name is
first used. `replace_gloo()` is for programs whose backend name is fixed; `python -m muster.torch
program.py`, `muster run --replace-gloo` and MUSTER_REPLACE_GLOO=1 do it for programs that are not
to be edited. CUDA tensors travel through pinned memory of the host. docs/user/torch-backend.md has
the details.
"""

import atexit
import datetime
import functools
import os
import sys
import weakref
from multiprocessing import spawn as _spawn

import torch.distributed as _dist
import torch.distributed.distributed_c10d as _c10d
from torch import device as _device
from torch.accelerator import current_accelerator as _current_accelerator
from torch.cuda import device_count as _gpus
from torch.nn.parallel import DistributedDataParallel as _DDP

import muster  # noqa: F401 - the check of torch's version
from muster import _C
from muster._C import ProcessGroupMuster

__all__ = ["ProcessGroupMuster", "register", "replace_gloo"]

_TYPES = _dist.ProcessGroup.BackendType
_GLOO, _CUSTOM = _TYPES.GLOO, _TYPES.CUSTOM


def _lend_buckets():
    """Lets DDP take its buckets' memory from the backend, which torch leaves off by default. Not
    where a GPU's backend would allocate them too.
    """
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
            timeout
            if isinstance(timeout, datetime.timedelta)
            else datetime.timedelta(seconds=timeout),
            options.group_id,
            list(options.global_ranks_in_group),
        )

    return create


def register():
    """Makes `muster` a backend of torch.distributed. Importing this module does it; torch calls it
    by the entry point.
    """
    if "MUSTER" not in _dist.Backend._plugins:
        _dist.Backend.register_backend(
            "muster", _create("muster"), extended_api=True, devices=["cpu", "cuda"]
        )
        if hasattr(_c10d, "_create_shrunk_process_group"):
            _c10d._create_shrunk_process_group = _shrunk_as_custom(
                _c10d._create_shrunk_process_group
            )
        _dist.ProcessGroup._register_backend = _of_a_type_of_its_own(
            _dist.ProcessGroup._register_backend
        )
        _c10d._get_object_coll_device = _on_the_cpu(_c10d._get_object_coll_device)


def _shrunk_as_custom(create):
    """torch takes what is left of any group of CPU tensors for its own Gloo, and DDP then reads it
    as one.
    """

    @functools.wraps(create)
    def created(backend, remaining_ranks, metadata, is_default_group):
        group = create(backend, remaining_ranks, metadata, is_default_group)
        if backend.name() in ("muster", "gloo"):  # torch's own Gloo cannot shrink
            for device, name in (
                _c10d.BackendConfig(metadata["backend_config"]).get_device_backend_map().items()
            ):
                if name == backend.name():
                    group._register_backend(
                        _device(device), _dist.ProcessGroup.BackendType.CUSTOM, backend
                    )
            group._set_default_backend(_dist.ProcessGroup.BackendType.CUSTOM)
        return group

    return created


# Group -> the types that backends in it have got in place of CUSTOM, by their names.
_SPARES = weakref.WeakKeyDictionary()


def _of_a_type_of_its_own(register_backend):
    """In a group torch keeps one backend of each type, for all devices whose backend has that type.
    All that it does not ship have one type: of muster and such a backend in one group, the second
    gets a type that the group does not use.
    """

    @functools.wraps(register_backend)
    def registered(group, device, kind, backend=None):
        if kind != _CUSTOM or backend is None:
            return register_backend(group, device, kind, backend)
        spares = _SPARES.setdefault(group, {})
        if backend.name() in spares:
            return register_backend(group, device, spares[backend.name()], backend)
        types = _types_in(group)
        custom = {name for name, its_type in types.items() if its_type == _CUSTOM}
        is_shared = {"muster", "gloo"} & {*custom, backend.name()} if custom else False
        if not is_shared or backend.name() in custom:
            return register_backend(group, device, kind, backend)
        is_default = group.name() == "custom" and all(
            _precedence(group, device) > _precedence(group, other) for other in group._device_types
        )
        used = {*types.values(), *spares.values()}
        kind = next((spare for spare in (_TYPES.UCC, _TYPES.MPI) if spare not in used), None)
        if kind is None:
            raise ValueError(
                f"torch has no type left for backend {backend.name()} in this group: a group has "
                "at most three backends that torch does not ship; use another group for it"
            )
        register_backend(group, device, kind, backend)
        spares[backend.name()] = kind
        if is_default:
            group._set_default_backend(kind)
        return None

    return registered


def _types_in(group):
    """The types of the group's backends, by their names."""
    names = {group._get_backend(device).name() for device in group._device_types}
    return {name: _dist.Backend.backend_type_map.get(name, _CUSTOM) for name in names}


def _precedence(group, device):
    """The greater, the rather is the device's backend the group's default one, by torch's rule."""
    of_torch = (group.bound_device_id, _current_accelerator())
    return (*(known is not None and known.type == device.type for known in of_torch),
            device.type != "cpu")  # fmt: skip


def replace_gloo():
    """From now on torch.distributed's backend `gloo` is muster's engine, in this process. Call it
    before init_process_group.

    `torch.distributed.ProcessGroupGloo` is then `ProcessGroupMuster`. DDP's logging data
    (`_get_ddp_logging_data`) read as on gloo with its default options. Called again it does
    nothing.
    """
    if getattr(_dist, "ProcessGroupGloo", None) is ProcessGroupMuster:
        return
    if _dist.is_initialized():
        raise RuntimeError(
            "replace_gloo() comes too late: torch.distributed is initialised already"
        )
    # Registered anew, its type becomes CUSTOM: torch then takes it for no ProcessGroupGloo.
    _dist.Backend.register_backend(
        "gloo", _create("gloo"), extended_api=True, devices=["cpu", "cuda"]
    )
    _DDP._get_ddp_logging_data = _logged_as_gloo(_DDP._get_ddp_logging_data)
    _dist.ProcessGroup._register_backend = _never_as_gloo(_dist.ProcessGroup._register_backend)
    # In torch.distributed only: what stands beside it in distributed_c10d is for torch's own
    # wrapper, which takes no other class.
    _dist.ProcessGroupGloo = ProcessGroupMuster


def replace_gloo_if_asked():
    """`replace_gloo()` where MUSTER_REPLACE_GLOO asks for it, in this process and in those that
    multiprocessing spawns.
    """
    if os.environ.get("MUSTER_REPLACE_GLOO", "").lower() not in ("1", "true", "yes", "on"):
        return
    replace_gloo()
    if not hasattr(_spawn.get_command_line, "__wrapped__"):
        _spawn.get_command_line = _importing_this(_spawn.get_command_line)


def _importing_this(command_line):
    @functools.wraps(command_line)
    def command_that_imports(**arguments):
        command = command_line(**arguments)
        if "-c" in command:
            command[command.index("-c") + 1] = (
                "import muster.torch; " + command[command.index("-c") + 1]
            )
        return command

    return command_that_imports


def _never_as_gloo(register_backend):
    """Programs register what they take for a ProcessGroupGloo as one; torch's C++ would then read
    it as one.
    """

    @functools.wraps(register_backend)
    def registered(group, device, kind, backend=None):
        if not isinstance(backend, ProcessGroupMuster) or kind != _GLOO:
            return register_backend(group, device, kind, backend)
        register_backend(group, device, _CUSTOM, backend)
        if group.name() == "gloo":
            group._set_default_backend(_CUSTOM)
        return None

    return registered


def _on_the_cpu(device_of):
    """torch asks where objects that a group sends are to lie, and takes a bare backend only if it
    is its own Gloo.
    """

    @functools.wraps(device_of)
    def object_device(group=None):
        return "cpu" if isinstance(group, ProcessGroupMuster) else device_of(group)

    return object_device


def _logged_as_gloo(logging_data):
    @functools.wraps(logging_data)
    def logged(ddp):
        data = logging_data(ddp)
        if data.get("backend_name") == "custom" and _dist.get_backend(ddp.process_group) == "gloo":
            data["backend_name"] = "gloo"
            for name in ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"):
                data[name.lower()] = os.environ.get(name, "N/A")
            data["gloo_num_threads"] = 2  # gloo's default
        return data

    return logged


@atexit.register
def _leave():
    # A program that ended without destroy_process_group: others may still read what this rank has
    # sent. After an error it does not wait: the others are told of it (_failure.py).
    if not hasattr(sys, "last_type"):
        _C.leave_torch_job(datetime.timedelta(seconds=10))


register()
replace_gloo_if_asked()
