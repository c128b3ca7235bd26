# SPDX-License-Identifier: BSD-3-Clause
"""How ranks find each other: a URL, or a handler of the program's own for another scheme."""

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import torch

from . import _C
from ._lookups import forget_graphs

__all__ = ["register_rendezvous_handler", "rendezvous"]

Met = tuple[_C.Store, int, int]
Handler = Callable[..., Iterator[Met]]

_handlers: dict[str, Handler] = {}
_OWN = ("env", "tcp", "file")
_TIMEOUT = datetime.timedelta(seconds=300)


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """`init_process_group(init_method="SCHEME://...")` asks `handler(url, timeout=...)` for an
    iterator over (store, rank, world size), of which it takes the first. A rank and a world size
    that the caller gave are in the URL's query, as `?rank=0&world_size=2`. The store is any of
    muster's, one derived from Store, or torch's. Raises RuntimeError where the scheme has a
    handler.
    """
    if scheme in _handlers or scheme in _OWN:
        raise RuntimeError(
            f"register_rendezvous_handler: there is a handler of {scheme}:// already"
        )
    _handlers[scheme] = handler


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: int | torch.device | None = None,
    _ranks: Sequence[int] | None = None,
    enable_reconfigure: bool = False,
    share_memory: bool | None = None,
    heartbeat_timeout: datetime.timedelta | None = None,
) -> None:
    """Makes the default group; blocks until every rank has joined. backend: a name, or as
    `cpu:native,cuda:nccl`; None: native for CPU tensors, and nccl for CUDA tensors where there are
    a GPU and NCCL. init_method: an URL (`env://`, `tcp://host:port`, `file:///path`, or of a scheme
    that register_rendezvous_handler knows), `env://` where there is neither it nor a store; store:
    with rank and world_size, torch.distributed's are taken too. timeout: datetime.timedelta, of
    this and of the group's calls; None: 30 minutes, 10 if nccl serves the group alone. group_name
    keeps jobs apart that share one address. pg_options: for a registered backend or nccl.
    device_id: a torch.device with an index, or the number of a GPU, on every rank or on none: nccl
    connects the ranks at once. _ranks is taken for torch's sake; enable_reconfigure raises.
    share_memory: torch's CPU tensors lie where the other ranks of the host can read them; None: as
    the environment says. heartbeat_timeout: how long a rank of another host may be silent before it
    counts as failed, 0: for ever; None: as the environment says, else 10 seconds. Raises
    DistStoreError naming the ranks that did not come, DistNetworkError for addresses, ValueError
    (DistArgumentError) for arguments and for a second call.
    """
    met = None if init_method is None else _meet(init_method, rank, world_size, timeout)
    if met is not None:
        init_method = None
        store, rank, world_size = met
    _C.init_process_group(
        backend,
        init_method,
        timeout,
        world_size,
        rank,
        store,
        group_name,
        pg_options,
        device_id,
        _ranks,
        enable_reconfigure,
        share_memory,
        heartbeat_timeout,
    )
    forget_graphs()


def shrink_group(
    ranks_to_exclude: Sequence[int] = (),
    group: _C.ProcessGroup | None = None,
    shrink_flags: int = 0,
    pg_options: object = None,
    timeout: datetime.timedelta | None = None,
) -> _C.ProcessGroup:
    """A group of those members that are left: without the listed ranks of the group, and without
    those that have died or die meanwhile. Every survivor calls it. shrink_flags: SHRINK_ABORT ends
    first what is in flight. If the default group is shrunk, the new one takes its place, with
    ranks from 0. Raises DistBackendError naming a living member that does not call within `timeout`
    (datetime.timedelta; None: the group's), ValueError (DistArgumentError) for ranks that the group
    has not, for one named twice, for a caller that is excluded and for one that is no member.
    """
    shrunk = _C.shrink_group(list(ranks_to_exclude), group, shrink_flags, pg_options, timeout)
    forget_graphs()  # the default group may be another one now
    return shrunk


def _meet(url: str, rank: int, world_size: int, timeout: datetime.timedelta | None) -> Met | None:
    """The result of the scheme's registered handler; None if the scheme has none."""
    scheme = urlsplit(url).scheme
    if scheme in _OWN or scheme not in _handlers:
        return None
    return next(iter(rendezvous(url, rank, world_size, timeout=timeout or _TIMEOUT)))


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Met]:
    """An iterator over (store, rank, world size) for an URL: `env://`, `tcp://host:port`,
    `file:///path`, or one of a registered scheme. With the built-in ones, rank 0 serves the store
    that it gives; rank and world_size come from the query, or for env:// from the environment,
    where they are left out. timeout: datetime.timedelta. Raises ValueError (DistArgumentError) for
    URLs and numbers, DistStoreError and DistNetworkError as TCPStore.
    """
    if not isinstance(url, str):
        raise RuntimeError(f"`url` must be a string, not {type(url).__name__}: {url!r}")
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    for name, given in (("rank", rank), ("world_size", world_size)):
        if given != -1 and query.setdefault(name, str(given)) != str(given):
            raise _C.DistArgumentError(
                f"rendezvous: {name} is {given}, and {query[name]} in {url}; give it once"
            )
    if parts.scheme in _handlers:
        whole = urlunsplit(parts._replace(query=urlencode(query)))
        return _handlers[parts.scheme](whole, **kwargs)
    built_in = {"env": _by_environment, "tcp": _by_address, "file": _by_file}.get(parts.scheme)
    if built_in is None:
        raise RuntimeError(
            f"No rendezvous handler for {parts.scheme}://: it is none of {', '.join(_OWN)}; "
            "register_rendezvous_handler makes one"
        )
    return built_in(parts, query, kwargs.get("timeout", _TIMEOUT))


def _number(query: dict[str, str], name: str, what: str) -> int:
    try:
        return int(query[name])
    except (KeyError, ValueError):
        raise _C.DistArgumentError(
            f"rendezvous: {what} needs {name}; give it, or ?{name}="
        ) from None


def _by_environment(
    parts: Any, query: dict[str, str], timeout: datetime.timedelta
) -> Iterator[Met]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        if name not in query and variable in os.environ:
            query[name] = os.environ[variable]
        elif name not in query:
            missing.append(variable)
    if missing:
        raise _C.DistArgumentError(
            f"rendezvous: env:// needs {', '.join(missing)} in the environment, where `muster run` "
            "and torchrun put them"
        )
    rank, size = _number(query, "rank", "env://"), _number(query, "world_size", "env://")
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    yield (
        _C.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            rank == 0 and not agents,
            timeout,
            multi_tenant=True,
        ),
        rank,
        size,
    )


def _by_address(parts: Any, query: dict[str, str], timeout: datetime.timedelta) -> Iterator[Met]:
    if parts.port is None:
        raise _C.DistArgumentError(f"rendezvous: {urlunsplit(parts)} has no port")
    rank, size = _number(query, "rank", "tcp://"), _number(query, "world_size", "tcp://")
    store = _C.TCPStore(
        parts.hostname or "", parts.port, size, rank == 0, timeout, multi_tenant=True
    )
    yield store, rank, size


def _by_file(parts: Any, query: dict[str, str], timeout: datetime.timedelta) -> Iterator[Met]:
    if not parts.path:
        raise _C.DistArgumentError("rendezvous: file:// needs a path")
    rank, size = _number(query, "rank", "file://"), _number(query, "world_size", "file://")
    store = _C.FileStore(parts.path, size)
    store.set_timeout(timeout)
    yield store, rank, size
