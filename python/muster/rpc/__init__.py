# SPDX-License-Identifier: BSD-3-Clause
"""Calls to functions on other workers: torch.distributed.rpc's names. `import muster as dist`, then
`dist.rpc`.

    rpc.init_rpc("worker0", rank=0, world_size=2)
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    rpc.shutdown()

docs/user/rpc.md tells of the rest. Functions and their arguments travel as pickles, which are read
only from workers that have proved the job's secret, and name only what `init_rpc(functions=[...])`
lists where that is given; tensors travel beside them.
"""

import atexit

from .. import _C
from .._C import BackendType, RpcBackendOptions, RRef, WorkerInfo
from . import backend_registry, constants, functions, options  # noqa: F401
from .backend_registry import (
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from .inside import Future, dumps, name_of  # noqa: F401
from .policy import in_force, policy_of

__all__ = [
    "BackendType",
    "Future",
    "ProcessGroupRpcBackendOptions",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "allow_operator",
    "backend_registered",
    "construct_rpc_backend_options",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_backend",
    "init_rpc",
    "is_available",
    "is_initialized",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
]

UNSET_RPC_TIMEOUT = -1.0
# torch's names.
TensorPipeRpcBackendOptions = ProcessGroupRpcBackendOptions = RpcBackendOptions
PyRRef = RRef


def is_available():
    """True wherever muster can be imported."""
    return True


class _Others:
    """The agent of a registered backend that is in use, and the timeout of its calls."""

    agent, timeout = None, constants.DEFAULT_RPC_TIMEOUT_SEC


_others = _Others()


def is_initialized():
    """Whether init_rpc was called, and shutdown was not since."""
    return _others.agent is not None or _C._rpc_is_initialized()


def init_rpc(
    name,
    backend=None,
    rank=-1,
    world_size=None,
    rpc_backend_options=None,
    *,
    store=None,
    allow_pickle=None,
    functions=None,
):
    """Joins the workers of the job as `name`, and blocks until all have come.

    Names are unique: letters, digits, `_`, `-` and `:`. rank and world_size come from the
    environment (`muster run`, `torchrun`) where they are left out. `store` (any of muster's)
    replaces `rpc_backend_options.init_method`, and needs both. backend: a BackendType, of muster's
    own agent or of one that register_backend has added. Starts no process group.

    functions: the functions and classes that calls and answers of other workers may name here, all
    of modules: functions to be called, classes of arguments and results, classes whose public
    methods may be called through an RRef. Anything else is refused where it is read. Tensors,
    numbers, text, containers of them, RRefs and operators by name need not be listed. allow_pickle:
    True, the default where functions is None, lets them name anything that this worker can import,
    as torch does; False without functions lets them name nothing. MUSTER_ALLOW_PICKLE=0 makes False
    the default for the whole job, and refuses True.

    Raises DistArgumentError where RPC is running already, two workers take one name or these two
    contradict each other, DistStoreError naming the ranks that did not come.
    """
    if _others.agent is not None:
        raise _C.DistArgumentError("init_rpc: RPC is running already; call shutdown first")
    in_force.enter(policy_of(allow_pickle, functions))
    try:
        if backend_registry.is_native(backend):
            backend_registry.start_native(
                store, name, rank, world_size, rpc_backend_options, backend
            )
        else:
            _start_registered(backend, store, name, rank, world_size, rpc_backend_options)
    except BaseException:
        in_force.leave()
        raise


def _start_registered(backend, store, name, rank, world_size, given):
    if given is None:
        given = construct_rpc_backend_options(backend)
    starting = backend_registry.starting
    starting.inside = True
    try:
        agent = init_backend(
            backend,
            store=store,
            name=name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=given,
        )
    finally:
        starting.inside = False
    if agent is None and not _C._rpc_is_initialized():
        raise _C.DistArgumentError(
            f"init_rpc: the function that {backend!r} was registered with has started no agent: it "
            "gave None, and has not called init_backend of muster's own"
        )
    _others.agent = agent
    _others.timeout = getattr(given, "rpc_timeout", _Others.timeout)


def allow_operator(name):
    """Lets other workers call an operator of torch by name here that does more than compute
    tensors, or one of a library of your own ("mylib::scale"), for the life of the process. Raises
    DistArgumentError where torch has no such operator.
    """
    _C._allow_operator(name)


def shutdown(graceful=True, timeout=0):
    """Ends RPC of this worker. Graceful: waits until all workers have called it and nothing is
    under way anywhere, `timeout` seconds at most (0: for ever); then raises DistBackendError naming
    the workers that it waits for. Otherwise ends at once.
    """
    ran = is_initialized()
    try:
        if _others.agent is not None:
            _others.agent.shutdown(graceful, timeout)
            _others.agent = None
        else:
            _C._shutdown_rpc(graceful, timeout)
    finally:  # it may raise because of other workers, and end this one all the same
        if ran and not is_initialized():
            in_force.leave()


def get_worker_info(worker_name=None):
    """A worker by its name (or rank); None: this one."""
    if _others.agent is not None:
        return _others.agent.get_worker_info(worker_name)
    return _C._worker_info(worker_name)


def get_worker_infos():
    """All workers, by rank."""
    if _others.agent is not None:
        return _others.agent.get_worker_infos()
    return _C._worker_infos()


def get_rpc_timeout():
    """The timeout of calls that give none, in seconds; 0: never."""
    return _C._rpc_timeout() if _others.agent is None else _others.timeout


def set_rpc_timeout(rpc_timeout):
    """The timeout, in seconds, of calls from now on that give none; 0: never."""
    if _others.agent is None:
        _C._set_rpc_timeout(rpc_timeout)
    else:
        _others.timeout = rpc_timeout


_set_rpc_timeout = set_rpc_timeout


def _call(func, args, kwargs):
    """The arguments for the call of `func`, and its name in errors."""
    arguments = () if args is None else tuple(args)
    if isinstance(func, str):
        if kwargs:
            raise _C.DistArgumentError(
                f"{func!r} is called by its name, and takes no keyword arguments: "
                f"{', '.join(kwargs)}"
            )
        return arguments, func
    if not callable(func):
        raise _C.DistArgumentError(
            "a call needs a function, or the name of one of C++'s or of torch's operators, not "
            f"{func!r}"
        )
    return (func, arguments, {} if kwargs is None else kwargs), name_of(func)


def _limit(timeout):
    """The timeout of a call by the agent of a registered backend."""
    return get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout


def rpc_sync(to, func, args=None, kwargs=None, timeout=UNSET_RPC_TIMEOUT):
    """Has worker `to` (a name, rank or WorkerInfo) run `func(*args, **kwargs)`, and returns its
    result or raises its exception.

    func: a callable that both workers can import, a TorchScript function, or text: one of torch's
    operators ("aten::add"), or of the functions that are registered in C++ there. timeout: seconds;
    0: never, -1: get_rpc_timeout(). Arguments are the callee's own copies. Exceptions come as their
    type where it is known here, with the worker in the text, its traceback as a note, and the
    attributes `worker`, `worker_id`, `remote_type`, `remote_text`, `remote_traceback`.
    DistBackendError where the time is over (`timed out`) or the worker is lost (`peer failed`).
    """
    if _others.agent is not None:
        return rpc_async(to, func, args, kwargs, timeout).wait()
    arguments, name = _call(func, args, kwargs)
    return _C._rpc_sync(to, func, arguments, name, timeout)


def rpc_async(to, func, args=None, kwargs=None, timeout=UNSET_RPC_TIMEOUT):
    """rpc_sync without waiting: a torch.futures.Future of the result. Arguments are read before it
    returns: later changes do not show.
    """
    if _others.agent is not None:
        return _others.agent.rpc_async(to, func, args or (), kwargs or {}, _limit(timeout))
    arguments, name = _call(func, args, kwargs)
    future = Future()
    started = _C._rpc_async(to, func, arguments, name, timeout, future)
    if not future.done():
        future._call = started
    return future


def remote(to, func, args=None, kwargs=None, timeout=UNSET_RPC_TIMEOUT):
    """Has worker `to` run `func(*args, **kwargs)` and keep the result: an RRef to it, at once. Its
    to_here() raises the failure.
    """
    if _others.agent is not None:
        if not hasattr(_others.agent, "remote"):
            raise _C.DistError("remote: the agent of this RPC backend has no `remote`")
        return _others.agent.remote(to, func, args or (), kwargs or {}, _limit(timeout))
    arguments, name = _call(func, args, kwargs)
    return _C._remote(to, func, arguments, name, timeout)


@atexit.register
def _leave():
    # A program that ended without shutdown: its threads may not wait for a Python that is gone.
    if _C._rpc_is_initialized():
        _C._shutdown_rpc(False, 0)
