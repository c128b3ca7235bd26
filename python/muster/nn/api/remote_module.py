# SPDX-License-Identifier: BSD-3-Clause
"""A torch.nn.Module that lives on another worker."""

import torch

from ... import _C, rpc
from ...rpc import inside


def _parsed(remote_device):
    worker, slash, device = str(remote_device).partition("/")
    try:
        if worker and (device or not slash):
            return worker, torch.device(device or "cpu")
    except RuntimeError:
        pass
    raise ValueError(
        f'RemoteModule: {remote_device!r} is no remote device: "worker/device", as '
        '"trainer0/cuda:0", or "worker" for its cpu'
    )


def _moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(each, device) for each in value)
    if type(value) is dict:
        return {key: _moved(each, device) for key, each in value.items()}
    return value


def _make(module_cls, args, kwargs, device):
    inside.check_call(module_cls, args, kwargs)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"RemoteModule: {module_cls!r} makes {type(module).__name__}, which is no "
            "torch.nn.Module"
        )
    return rpc.RRef(module.to(device))


def _module_of(reference):
    module = reference.local_value()
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"RemoteModule: the reference is to {type(module).__name__}, which is no "
            "torch.nn.Module"
        )
    return module


def _forward(module, device, args, kwargs, stays=False):
    local = _module_of(module)
    inside.check_method(local, "forward")
    if torch.device(device).type == "cpu":
        return local(*args, **kwargs)
    given = local(*_moved(args, device), **_moved(kwargs, device))
    return given if stays else _moved(given, "cpu")


def _parameters(module, recurse):
    local = _module_of(module)
    inside.check_method(local, "forward")
    return [rpc.RRef(each) for each in local.parameters(recurse)]


def _without(name):
    def refuse(self, *args, **kwargs):
        raise ValueError(
            f"a RemoteModule has no {name}: the module is on {self.on!r}; call functions on it "
            "there (get_module_rref)"
        )

    return refuse


class RemoteModule(torch.nn.Module):
    """A module on another worker, torch.distributed.nn's: forward runs there, and in a context of
    distributed autograd gradients flow back.

    remote_device: "worker/device"; "worker" alone is its cpu. `module_cls(*args, **kwargs)` makes
    the module there, which blocks until it is made and raises what its constructor raised. Inputs
    are moved to the module's device. Outputs come back where the device map to that worker says;
    without one, on the cpu. Needs init_rpc. The module lives as long as a RemoteModule or an RRef
    to it does. It may go to other workers in calls.
    """

    def __init__(self, remote_device, module_cls, args=None, kwargs=None):
        super().__init__()
        worker, device = _parsed(remote_device)
        made = rpc.rpc_sync(
            worker, _make, (module_cls, tuple(args or ()), dict(kwargs or {}), str(device))
        )
        self._set(made, worker, device)

    def _set(self, module_rref, worker, device):
        self.on, self.device, self.module_rref = worker, device, module_rref

    @staticmethod
    def init_from_module_rref(remote_device, module_rref, _module_interface_cls=None):
        """Another handle to a module that is there already: `module_rref` is an RRef to it.
        _module_interface_cls is taken for torch's sake.
        """
        worker, device = _parsed(remote_device)
        owner = module_rref.owner_name()
        if owner != worker:
            raise ValueError(f"RemoteModule: the module is on {owner!r}, not on {worker!r}")
        made = RemoteModule.__new__(RemoteModule)
        torch.nn.Module.__init__(made)
        made._set(module_rref, worker, device)
        return made

    def forward(self, *args, **kwargs):
        """Blocks, and returns the result of the module's forward."""
        return rpc.rpc_sync(self.module_rref.owner(), _forward, self._call(args, kwargs))

    def forward_async(self, *args, **kwargs):
        """The same as a future."""
        return rpc.rpc_async(self.module_rref.owner(), _forward, self._call(args, kwargs))

    def _call(self, args, kwargs):
        by_map = _C._has_device_map(self.on)
        return self.module_rref, str(self.device), args, kwargs, by_map

    def remote_parameters(self, recurse=True):
        """RRefs to the module's parameters, in their order, for a DistributedOptimizer; of all
        submodules too where `recurse`.
        """
        return rpc.rpc_sync(self.module_rref.owner(), _parameters, (self.module_rref, recurse))

    def get_module_rref(self):
        """An RRef to the module itself."""
        return self.module_rref

    def __reduce__(self):
        return RemoteModule.init_from_module_rref, (f"{self.on}/{self.device}", self.module_rref)

    def extra_repr(self):
        return f"on={self.on!r}, device={self.device}"


# Methods of torch.nn.Module that the module's worker would have to carry out.
for _name in (
    "register_buffer",
    "register_parameter",
    "add_module",
    "apply",
    "cuda",
    "ipu",
    "xpu",
    "cpu",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "register_backward_hook",
    "register_forward_pre_hook",
    "register_forward_hook",
    "state_dict",
    "load_state_dict",
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "children",
    "named_children",
    "modules",
    "named_modules",
    "train",
    "eval",
    "requires_grad_",
    "zero_grad",
    "share_memory",
):
    setattr(RemoteModule, _name, _without(_name))
