"""torch.distributed.rpc.backend_registry's names. There is one agent, muster's own, under two
names.
"""

from .. import _C
from .._C import BackendType, RpcBackendOptions
from .constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

__all__ = [
    "BackendType",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


def backend_registered(backend_name):
    """Whether init_rpc knows an agent of that name: `NATIVE` and `TENSORPIPE`, which is another
    name of it.
    """
    return backend_name in ("NATIVE", "TENSORPIPE")


def register_backend(backend_name, construct_rpc_backend_options_handler, init_backend_handler):
    """Raises RuntimeError for a name that is taken, as torch does, and NotImplementedError for
    others.
    """
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    raise NotImplementedError(
        "register_backend: muster.rpc has no agents beside its own, so none can be made by "
        f"{init_backend_handler!r}: init_rpc takes "
        "RpcBackendOptions for what can be chosen, and torch.distributed.rpc has agents of torch's "
        "kind"
    )


def construct_rpc_backend_options(
    backend,
    rpc_timeout=DEFAULT_RPC_TIMEOUT_SEC,
    init_method=DEFAULT_INIT_METHOD,
    **kwargs,
):
    """RpcBackendOptions: the rest are its other arguments. Raises ValueError (DistArgumentError)
    for another backend.
    """
    name = getattr(backend, "name", backend)
    if not backend_registered(name):
        raise _C.DistArgumentError(
            f"there is no RPC agent {name!r}; they are NATIVE and TENSORPIPE"
        )
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend, *args, **kwargs):
    """`init_rpc`, as torch's agents are started: store, name, rank, world_size, rpc_backend_options
    by name.
    """
    from . import init_rpc

    init_rpc(kwargs.pop("name"), backend, *args, **kwargs)
