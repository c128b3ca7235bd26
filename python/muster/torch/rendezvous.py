# SPDX-License-Identifier: BSD-3-Clause
"""`torchrun --rdzv-backend=muster`: the nodes of a job of stock torchrun meet by muster's
membership, as those of `muster run` do. docs/user/torchrun.md has the options.

torchrun finds `handler` by the entry point group `torchrun.handlers`. A program that makes agents
itself registers it: `rendezvous_handler_registry.register("muster", handler())`.
"""

import concurrent.futures
import datetime
import logging
import select
import threading
import time

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from muster import _C

__all__ = ["MusterRendezvous", "handler"]

_log = logging.getLogger(__name__)

# Seconds.
_DEFAULTS = {
    "join_timeout": 600.0,
    "last_call_timeout": 30.0,
    "repair_timeout": 0.0,
    "close_timeout": 30.0,
    "read_timeout": 60.0,
    "keep_alive_interval": 5.0,
}
# torchrun's other backends have them, and torchrun passes them on.
_WITHOUT_MEANING = {
    "cas_backoff_max_seconds",
    "heartbeat",
    "heartbeat_timeout",
    "is_host",
    "rank",
    "store_type",
    "use_libuv",
}
# The agent adds to a key that begins with this when its workers have ended well.
_EXIT_BARRIER = "torchelastic/agent/terminal_state"


def handler():
    """The class that makes the handlers; see the module."""
    return MusterRendezvous


class MusterRendezvous(RendezvousHandler):
    """One node of the job `params.run_id`. For one thread at a time. Nothing is connected before
    the first call of next_rendezvous or set_closed.

    A round is an epoch of the job. It begins on all nodes when a node is lost, when one joins for
    which there is room, and when an agent calls next_rendezvous again. A node keeps its rank as
    long as no node of a lower rank is lost without a replacement.
    """

    def __init__(self, params):
        """params: RendezvousParameters. Raises ValueError for those that it does not know."""
        self._run_id = params.run_id
        config = dict(params.config)
        config.setdefault("join_timeout", config.pop("timeout", _DEFAULTS["join_timeout"]))
        kind = config.pop("membership", "agent")
        if kind not in ("agent", "etcd", "kubernetes"):
            raise ValueError(f"--rdzv-conf: membership={kind} is not agent, etcd or kubernetes")
        keep_alive = None
        if "keep_alive_interval" in config or "keep_alive_max_attempt" in config:
            attempts = params.get_as_int("keep_alive_max_attempt", 3)
            keep_alive = _seconds(config, "keep_alive_interval") * attempts
            if keep_alive <= datetime.timedelta(0):
                raise ValueError(
                    "--rdzv-conf: keep_alive_interval and keep_alive_max_attempt are above 0"
                )
        known = {*_DEFAULTS, "keep_alive_max_attempt", "membership", "timeout"}
        for key in config:
            if key not in known | _WITHOUT_MEANING:
                raise ValueError(
                    f"--rdzv-conf: {key} is not known to --rdzv-backend=muster; there are "
                    + ", ".join(sorted(known))
                )
        self._close_timeout = _seconds(config, "close_timeout").total_seconds()
        self._read_timeout = _seconds(config, "read_timeout")
        self._join_timeout = _seconds(config, "join_timeout").total_seconds()
        self._options = {
            "membership": kind,
            "endpoint": (params.endpoint or "").strip(),
            "run_id": params.run_id,
            "min_nodes": params.min_nodes,
            "max_nodes": params.max_nodes,
            "local_addr": params.local_addr,
            "join_timeout": _seconds(config, "join_timeout"),
            "last_call": _seconds(config, "last_call_timeout"),
            "repair_timeout": _seconds(config, "repair_timeout"),
            "keep_alive": keep_alive,
        }
        self._forget()

    def _forget(self):
        self._node = None
        self._newest = None  # epoch; None: there is none yet, or the place in the job is lost
        self._taken = None  # the epoch of the workers
        self._complete = 0  # the last epoch to which all its nodes have come
        self._end = None  # of the job
        self._lost = None  # why the service cannot be reached any more
        self._alone = False

    def get_backend(self):
        return "muster"

    @property
    def use_agent_store(self):
        """False: rank 0 serves its own store at MASTER_PORT, which is kept free for it."""
        return False

    def get_run_id(self):
        return self._run_id

    def next_rendezvous(self):
        """Blocks until all nodes of a round with this one have come to it. Called again, it begins
        another round unless there is one already. A node for which the job has no room waits
        without limit.

        Raises RendezvousTimeoutError where too few nodes come within join_timeout,
        RendezvousConnectionError where the place where they meet cannot be reached,
        RendezvousClosedError once the job has ended (a waiting node: RendezvousGracefulExitError),
        ValueError for an endpoint or a secret that cannot be.
        """
        self._follow()
        stays = self._taken is not None and self._newest is self._taken
        if stays and self._end is None and self._lost is None:
            self._node.fail(
                self._taken.epoch, f"{self._node.name}: torchrun starts its workers again"
            )
        deadline = time.monotonic() + self._join_timeout
        while True:
            self._raise_if_ended()
            if self._lost is not None and time.monotonic() > deadline:
                raise RendezvousConnectionError(self._lost)
            if self._node is None or self._lost is not None:
                self._join()
            epoch = self._newest
            if epoch is None or epoch is self._taken or epoch.rank < 0:
                self._wait(None)
            elif (store := self._enter(epoch)) is not None:
                return self._take(epoch, store)

    def is_closed(self):
        """Whether the job has ended, as far as this node knows."""
        self._follow()
        return self._end is not None

    def set_closed(self):
        """Ends the job: no node begins another round. Workers that run go on."""
        if self._node is None:
            self._join()
        self._follow()
        if self._end is None and self._lost is None:
            self._node.close(f"closed by {self._node.name}")
        self._wait_for(lambda: self._end is not None)

    def num_nodes_waiting(self):
        """Above 0 where the agent is to end its workers and call next_rendezvous. Never blocks."""
        self._follow()
        if self._node is None:
            return 0
        if self._end is not None:
            return int(self._end.kind == "failed")
        if self._lost is not None:
            _log.warning("%s; joining again", self._lost)
            return 1
        if self._newest is self._taken:
            return 0
        if self._newest is None or self._taken is None:
            return 1
        return max(1, len({*self._newest.nodes} - {*self._taken.nodes}))

    def shutdown(self):
        """Closes the job and leaves it. A node that others need stays until they have left, up to
        close_timeout.
        """
        if self._node is None:
            return True
        try:
            self.set_closed()
            if self._node.serves(self._taken):
                self._wait_for(lambda: self._alone)
            return self._end is not None
        finally:
            self._forget()

    def _join(self):
        self._forget()
        try:
            self._node = _handling_signals(lambda: _C._RendezvousNode(**self._options))
        except _C.DistArgumentError:
            raise
        except _C.DistError as error:
            kind = RendezvousTimeoutError if error.code == "timed_out" else None
            raise (kind or RendezvousConnectionError)(
                f'the rendezvous "{self._run_id}": {error}'
            ) from error

    def _enter(self, epoch):
        """The store that its nodes share, when all have come; None where it is over before."""
        deadline = time.monotonic() + self._join_timeout
        self._node.arrive(epoch.epoch)
        self._wait_for(lambda: self._complete == epoch.epoch or self._is_over(epoch), deadline)
        if self._is_over(epoch):
            return None
        if self._complete != epoch.epoch:
            raise RendezvousTimeoutError(
                f'the rendezvous "{self._run_id}": not all of {", ".join(epoch.nodes)} have come '
                f"to round {epoch.epoch} within {self._join_timeout:g} s; does one hang?"
            )
        try:
            return _handling_signals(lambda: self._node.store_of(epoch, self._read_timeout))
        except _C.DistError as error:
            # The node that serves it is lost, which makes another epoch.
            self._wait_for(lambda: self._is_over(epoch), deadline)
            if self._is_over(epoch):
                return None
            raise RendezvousConnectionError(f'the rendezvous "{self._run_id}": {error}') from error

    def _is_over(self, epoch):
        return self._newest is not epoch or self._end is not None or self._lost is not None

    def _take(self, epoch, store):
        _log.info("round %d: node %d of %d: %s", *_place(epoch), epoch.text)
        self._taken = epoch
        if epoch.rank == 0:
            self._node.reserve_next_port()
        store.set_timeout(self._read_timeout)
        return RendezvousInfo(
            _RoundStore(epoch, store, self._finish),
            epoch.rank,
            epoch.world_size,
            RendezvousStoreInfo(epoch.master_addr, epoch.master_port),
        )

    def _finish(self, epoch):
        if self._node is not None and epoch is self._taken:
            self._node.finish(epoch.epoch)

    def _raise_if_ended(self):
        if self._end is None:
            return
        text = f'the rendezvous "{self._run_id}" has ended: {self._end.text}'
        if self._end.kind == "failed":
            raise RendezvousTimeoutError(text)
        if self._newest is not None and self._newest.rank < 0:
            raise RendezvousGracefulExitError(text)
        raise RendezvousClosedError(text)

    def _wait_for(self, reached, deadline=None):
        """Until `reached()`, the deadline (None: close_timeout from now) or a lost service."""
        if deadline is None:
            deadline = time.monotonic() + self._close_timeout
        while not reached() and self._lost is None and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())

    def _wait(self, seconds):
        """For news; None: without limit."""
        ready = select.poll()
        ready.register(self._node.fileno(), select.POLLIN)
        ready.poll(None if seconds is None else max(0, seconds) * 1000)
        self._follow()

    def _follow(self):
        for news in self._node.take() if self._node is not None else ():
            if news.kind == "epoch":
                self._newest = news
            elif news.kind == "displaced":
                self._newest = None
            elif news.kind == "complete":
                self._complete = news.epoch
            elif news.kind == "alone":
                self._alone = True
            elif news.kind == "lost":
                self._lost = news.text
            else:
                self._end = news


class _RoundStore(_C.PrefixStore):
    """The store of a round. Sees that the agent's workers have ended well: its node then takes part
    in no later round.
    """

    def __init__(self, epoch, store, finish):
        super().__init__(f"torchrun/{epoch.epoch}", store)
        self._epoch, self._finish = epoch, finish

    def add(self, key, amount):
        if key.startswith(_EXIT_BARRIER):
            self._finish(self._epoch)
        return super().add(key, amount)


def _place(epoch):
    return epoch.epoch, epoch.rank, epoch.world_size


def _seconds(config, key):
    value = config.get(key, _DEFAULTS[key])
    try:
        seconds = float(value)
        if seconds >= 0:
            return datetime.timedelta(seconds=seconds)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"--rdzv-conf: {key}={value} is no number of seconds")


def _handling_signals(call):
    """Blocks as `call` does. Python runs its handlers meanwhile, by which signals end torchrun."""
    outcome = concurrent.futures.Future()

    def run():
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result()
