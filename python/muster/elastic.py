# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that outlive their workers, under `muster run --elastic keep`: when a rank dies, the other
ranks keep their processes and memory, a replacement gets their state, and training goes on after
the last commit. Under other launchers `run` trains once and repairs nothing::

    state = elastic.State(model=model, optimizer=optimizer, step=0, seed=17)

    def train():
        ddp = DistributedDataParallel(model)  # made anew in every epoch of the job
        while state.step < steps:
            train_one(ddp, optimizer, batch_of(state.step, get_rank(), get_world_size()))
            state.step += 1
            state.commit()

    elastic.run(state, train)

A `ShardedState` adds what each rank has its own part of, such as the shards of FSDP.
docs/user/elastic-keep.md says what a program has to observe. The submodules (`agent`, `events`,
`multiprocessing`, ...) are those of torch.distributed.elastic.
"""

from __future__ import annotations

import collections
import datetime
import gc
import json
import os
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from ._lookups import forget_graphs

__all__ = ["Preempted", "ShardedState", "State", "epoch", "run", "share_of_batch"]

__path__: list[str] = []  # a package, whose submodules `_modules` finds


class Preempted(Exception):
    """Raised by `State.commit` to leave `run`: this process's node is to be given up. Let it
    pass.
    """


class _Slot:
    """Stands for a tensor in what is pickled."""

    def __init__(self, index: int) -> None:
        self.index = index


def _without_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach())
        return _Slot(len(tensors) - 1)
    if type(tree) in (dict, collections.OrderedDict):
        return type(tree)((key, _without_tensors(each, tensors)) for key, each in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_without_tensors(each, tensors) for each in tree)
    return tree  # other containers keep their type, and pickle their tensors


def _with_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Copies: an optimizer keeps what it is given."""
    if isinstance(tree, _Slot):
        return tensors[tree.index].clone()
    if type(tree) in (dict, collections.OrderedDict):
        return type(tree)((key, _with_tensors(each, tensors)) for key, each in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_with_tensors(each, tensors) for each in tree)
    return tree


def _is_sharded(thing: Any) -> bool:
    if isinstance(thing, torch.nn.Module):
        return any(_is_of_sharded_class(each) for each in thing.modules())
    return _is_of_sharded_class(thing)


def _is_of_sharded_class(thing: Any) -> bool:
    names = {each.__name__ for each in type(thing).__mro__}
    return not names.isdisjoint(
        {"FullyShardedDataParallel", "FSDPModule", "ZeroRedundancyOptimizer"}
    )


class State(_C._ElasticState):
    """The state that all ranks have alike between two steps, and its last commits, kept in memory.
    Each keyword becomes an attribute. Modules, optimizers, schedulers and whatever has `state_dict`
    and `load_state_dict` are filled in place, as are tensors; of a sampler with `set_epoch` the
    epoch is kept; everything else is a value that pickle knows, and may be assigned anew. seed:
    torch's and Python's random generators are seeded at every commit from it, the number of the
    commit and this rank, so that a step that is done again draws the same numbers; None: not.
    Raises ValueError for what is sharded, which is for a ShardedState.
    """

    def __init__(self, *, seed: int | None = None, **things: Any) -> None:
        super().__init__()
        for name, thing in things.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"elastic.State: the name {name} is taken")
            if _is_sharded(thing):
                raise ValueError(
                    f"elastic.State: of {name} each rank has a part; give it to an "
                    "elastic.ShardedState inside the function"
                )
        self.__dict__.update(things)
        self._names = list(things)
        self._seed = seed
        self._shards: ShardedState | None = None  # of this epoch

    def commit(self) -> None:
        """The end of a step, called by every rank after each, or after each tenth. Waits until all
        ranks have come; copies everything to the older of two places in memory. A commit that has
        returned on any rank that lives is never lost. Raises DistError as a collective does, and
        Preempted; `run` handles both.
        """
        if self._commit():
            raise Preempted(f"this node is to be given up; commit {self.commits} was its last")

    def _contents(self) -> tuple[bytes, list[torch.Tensor]]:
        def of(thing: Any) -> Any:
            if hasattr(thing, "load_state_dict"):
                return thing.state_dict()
            if hasattr(thing, "set_epoch") and not isinstance(thing, torch.Tensor):
                return thing.epoch
            return thing

        tensors: list[torch.Tensor] = []
        tree = {name: of(getattr(self, name)) for name in self._names}
        return pickle.dumps(_without_tensors(tree, tensors)), tensors

    def _put_back(self, rest: bytes, tensors: list[torch.Tensor]) -> None:
        for name, kept in _with_tensors(pickle.loads(rest), tensors).items():
            thing = getattr(self, name)
            if hasattr(thing, "load_state_dict"):
                thing.load_state_dict(kept)
                if isinstance(thing, torch.nn.Module):
                    thing.zero_grad()
            elif isinstance(thing, torch.Tensor):
                thing.copy_(kept)
            elif hasattr(thing, "set_epoch"):
                thing.set_epoch(kept)
            else:
                setattr(self, name, kept)

    def _reseed(self, commit: int, rank: int) -> None:
        if self._seed is None:
            return
        # A text: Python hashes it as a whole, so that neighbours are far from each other.
        chance = random.Random(f"{self._seed} {commit} {rank}")
        torch.manual_seed(chance.getrandbits(63))
        random.seed(chance.getrandbits(63))


class ShardedState:
    """State of which each rank has its own part: modules that muster.fsdp has sharded, their
    optimizers, ZeroRedundancyOptimizers. These hold a group, so the function that `run` calls makes
    them anew in each epoch, and this too, which adds them to the commits of `state` until the
    function ends::

        def train():
            model = FSDP(Net())
            optimizer = torch.optim.Adam(model.parameters())
            elastic.ShardedState(state, model=model, optimizer=optimizer).restore()
            while state.step < steps: ...

    Commits are then written to memory that the launcher holds too: they outlive any of the node's
    processes but the launcher. With several nodes each commit is also sent to a rank of the next
    node, and outlives the loss of its own. Any number of ranks can restore it. Keywords are what
    muster.checkpoint.save takes; an optimizer's module need not be among them.
    """

    def __init__(self, state: State, **things: Any) -> None:
        state._bind()
        self._state, self._things = state, things
        state._shards = self

    def restore(self) -> None:
        """Collective: puts everything, what the State has included, back to the last commit, and
        drops gradients. If the job has made none with shards, makes the first one, of what the
        ranks have. Raises DistError on all ranks if parts of the last commit are lost, with two
        neighbouring nodes at once.
        """
        if self._state._shards is not self:
            raise ValueError(
                "elastic.ShardedState.restore: the call of the function that made it has ended; "
                "make one in every call"
            )
        self._state._restore_sharded()

    def _contents(self) -> tuple[_C._CheckpointItems, str]:
        contents = self._parts()
        return _C._CheckpointItems(contents.items()), json.dumps(contents.values())

    def _wanted(self, index: _C._CheckpointIndex) -> _C._CheckpointItems:
        self._filled = self._parts()
        return _C._CheckpointItems(self._filled.wanted(index))

    def _put_back(self) -> None:
        self._filled.fill()
        del self._filled
        for each in self._things.values():
            if isinstance(each, torch.nn.Module):
                each.zero_grad()

    def _parts(self) -> Any:
        from .checkpoint.contents import Contents

        return Contents(self._things, _C.get_rank() if _C.is_initialized() else 0)


def run(
    state: State,
    train: Callable[[], Any],
    *,
    backend: str | None = None,
    timeout: datetime.timedelta | None = None,
    repair_timeout: datetime.timedelta = datetime.timedelta(minutes=10),
) -> str:
    """Calls `train` until it has returned on all ranks, and returns "finished"; "preempted" where
    this process is to end now, with the state of the last commit. Around each call is a default
    group of its own, made with `backend` and `timeout` as by init_process_group: groups and
    wrappers such as DDP belong into `train`. Functions of torch.compile are traced anew, for the
    new rank and size. Before each call all ranks get the last commit of any of them, or at the
    beginning rank 0's state. If a rank dies, the other ranks' calls raise at once, `train` ends
    with that exception, and is called again when the launcher has replaced the rank. A spare
    (`--spares`) blocks here until it is needed, and has no RANK before. Called once in a process:
    after it has finished, the launcher repairs nothing any more.

    Raises what `train` raises if it has nothing to do with the end of an epoch, and the failure of
    a group for which no further epoch comes within `repair_timeout`. While such a process ends, the
    others wait for its exit, for 30 s at most.
    """
    try:
        return _run_epochs(state, train, backend, timeout, repair_timeout)
    except BaseException as failure:
        # Exit handlers may take long, and the others notice at once that the group has failed. An
        # exit that is a success is no failure that they could wait for.
        if not isinstance(failure, SystemExit) or failure.code not in (None, 0):
            _C._elastic_note_ending()
        raise


def _run_epochs(
    state: State,
    train: Callable[[], Any],
    backend: str | None,
    timeout: datetime.timedelta | None,
    repair_timeout: datetime.timedelta,
) -> str:
    failure: Exception | None = None
    while True:
        try:
            place = _C._elastic_join(backend, timeout, repair_timeout)
        except _C.DistError as error:
            if failure is not None:
                raise failure from error
            raise
        if place is None:
            break
        os.environ.update(place)
        forget_graphs()
        outcome, failure = _run_epoch(state, train)
        if outcome is not None:
            _C._elastic_end_group(outcome == "preempted")
            return outcome
        # Objects that `train` has made go before their group, cycles too: the next epoch makes its
        # own.
        gc.collect()
        _C._elastic_drop_group()
    if _C.is_initialized():
        _C._elastic_drop_group()
    state._before_leaving()
    return "preempted"


def _run_epoch(state: State, train: Callable[[], Any]) -> tuple[str, None] | tuple[None, Exception]:
    try:
        state._from_survivors()
        train()
        # From here on all have come to the end, and no rank's death undoes it.
        state._agree_on_end()
    except Preempted:
        return "preempted", None
    except Exception as error:
        known = isinstance(error, _C.DistError)
        code, ranks = (error.code, error.ranks) if known else ("", [])
        if not _C._elastic_epoch_is_over(code, ranks, str(error)):
            raise
        # Its frames hold what `train` has made.
        error.__context__ = error.__cause__ = None
        return None, error.with_traceback(None)
    finally:
        state._unbind()
        state._shards = None
    return "finished", None


def share_of_batch(global_batch: int, largest: int | None = None) -> list[tuple[range, float]]:
    """This rank's part of a step whose batch has `global_batch` samples whatever the world size
    is. One item for each round of forward and backward, equally many on all ranks: the numbers of
    its samples, at most `largest` (None: no limit, so one round), and a weight. If the loss of a
    round is the mean over its samples times the weight, and DDP averages over the ranks, the
    gradients are those of the mean over the whole batch, up to rounding. In all rounds but the last
    the gradients need no averaging (`no_sync`). Raises DistError if a rank would have no sample in
    some round.

        for samples, weight in elastic.share_of_batch(256, largest=32):
            inputs, targets = data[samples.start : samples.stop]
            (weight * cross_entropy(ddp(inputs), targets)).backward()
    """
    return [
        (range(first, first + count), weight)
        for first, count, weight in _C._elastic_share_of_batch(global_batch, largest or 0)
    ]


def epoch() -> int:
    """Number of the epoch of the job that this process is in, as MUSTER_EPOCH; 0: of none."""
    return _C._elastic_epoch()
