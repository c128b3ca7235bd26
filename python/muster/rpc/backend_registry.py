# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.rpc.backend_registry's names: the kinds of RPC agents. muster's own agent has
two names, NATIVE and TENSORPIPE; programs register others.
"""

import collections
import threading

from .. import _C
from .._C import BackendType, RpcBackendOptions
from .constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

BackendValue = collections.namedtuple(
    "BackendValue", ["construct_rpc_backend_options_handler", "init_backend_handler"]
)


class _Starting(threading.local):
    """Whether this thread is in init_rpc with a registered backend, whose function may start
    muster's own agent: what other workers may name here has been settled then.
    """

    inside = False


starting = _Starting()


def _native_options(rpc_timeout, init_method, **kwargs):
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def start_native(
    store=None, name=None, rank=-1, world_size=None, rpc_backend_options=None, backend=None
):
    """muster's own agent. None: there is no object of it."""
    _C._init_rpc(
        name, backend, rank, -1 if world_size is None else world_size, rpc_backend_options, store
    )


def _init_native(*args, **kwargs):
    from . import init_rpc

    if starting.inside:
        return start_native(*args, **kwargs)
    given = dict(zip(("store", "name", "rank", "world_size", "rpc_backend_options"), args))
    given.update(kwargs)
    return init_rpc(**given)


_registered = {
    name: BackendValue(_native_options, _init_native) for name in ("NATIVE", "TENSORPIPE")
}
BackendType.value = property(
    lambda self: _registered.get(self.name), doc="The two functions of its registration."
)


def is_native(backend):
    """Whether init_rpc starts muster's own agent for it."""
    return backend is None or value_of(backend).init_backend_handler is _init_native


def value_of(backend):
    """Raises ValueError (DistArgumentError) for what is not registered."""
    name = str(getattr(backend, "name", backend)).upper()
    if name not in _registered:
        raise _C.DistArgumentError(
            f"there is no RPC agent {name!r}; they are {', '.join(sorted(_registered))}"
        )
    return _registered[name]


def backend_registered(backend_name):
    """Whether init_rpc knows an agent of that name: `NATIVE`, `TENSORPIPE`, which is another name
    of it, or one that was registered.
    """
    return backend_name.upper() in _registered


def register_backend(backend_name, construct_rpc_backend_options_handler, init_backend_handler):
    """A further kind of agent: gives its BackendType, which is an attribute of that class too.

    `construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)` makes the options of
    init_rpc where none are given. `init_backend_handler(store=, name=, rank=, world_size=,
    rpc_backend_options=)` starts the agent. It gives None if it has started muster's own, by
    `init_backend(BackendType.NATIVE, ...)`; else an object with `rpc_async(to, func, args, kwargs,
    timeout)`, which gives a torch.futures.Future, `get_worker_info(worker_name)`,
    `get_worker_infos()` and `shutdown(graceful, timeout)`. muster.rpc's functions call those, and
    its `remote` with the arguments of rpc_async if it has one. Raises RuntimeError for a name that
    is taken.
    """
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    made = _C._register_rpc_backend(backend_name)
    _registered[made.name] = BackendValue(
        construct_rpc_backend_options_handler, init_backend_handler
    )
    setattr(BackendType, backend_name, made)
    return made


def construct_rpc_backend_options(
    backend,
    rpc_timeout=DEFAULT_RPC_TIMEOUT_SEC,
    init_method=DEFAULT_INIT_METHOD,
    **kwargs,
):
    """The options that the backend's own function makes of these: RpcBackendOptions of muster's
    agent. Raises ValueError (DistArgumentError) for a backend that is not registered.
    """
    return value_of(backend).construct_rpc_backend_options_handler(
        rpc_timeout, init_method, **kwargs
    )


def init_backend(backend, *args, **kwargs):
    """Starts an agent of that kind, as init_rpc does: store, name, rank, world_size,
    rpc_backend_options.
    """
    return value_of(backend).init_backend_handler(*args, **kwargs)
