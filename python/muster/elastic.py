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
import types
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from ._lookups import forget_graphs
from .objects import broadcast_object_list

__all__ = ["Preempted", "ShardedState", "State", "epoch", "run", "share_of_batch"]

__path__: list[str] = []  # a package, whose submodules `_modules` finds


_PREFIX = "elastic.State."  # of tensors' names in commits with shards


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


class _Commit:
    """One commit. Memory of tensors stays for later ones."""

    def __init__(self) -> None:
        self.number = 0
        self.rest = b""
        self.tensors: list[torch.Tensor] = []

    def take(self, tree: dict[str, Any], number: int) -> None:
        self.number = 0
        self.rest, tensors = _parted(tree)
        before, self.tensors = self.tensors, []
        for index, tensor in enumerate(tensors):
            memory = before[index] if index < len(before) else None
            if (
                memory is not None
                and memory.shape == tensor.shape
                and memory.dtype == tensor.dtype
                and memory.device == tensor.device
            ):
                memory.copy_(tensor)
            else:
                memory = tensor.clone(memory_format=torch.contiguous_format)
            self.tensors.append(memory)
        self.number = number

    def tree(self) -> dict[str, Any]:
        return _with_tensors(pickle.loads(self.rest), self.tensors)


def _parted(tree: dict[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    return pickle.dumps(_without_tensors(tree, tensors)), tensors


def _kinds(tensors: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, str]]:
    """Shapes, dtypes and device types. Each rank has an accelerator of its own, the current one."""
    return [(each.shape, each.dtype, each.device.type) for each in tensors]


def _memory_of(kinds: list[tuple[torch.Size, torch.dtype, str]]) -> list[torch.Tensor]:
    return [torch.empty(s, dtype=d, device=v) for s, d, v in kinds]


def _is_sharded(thing: Any) -> bool:
    if isinstance(thing, torch.nn.Module):
        return any(_is_of_sharded_class(each) for each in thing.modules())
    return _is_of_sharded_class(thing)


def _is_of_sharded_class(thing: Any) -> bool:
    names = {each.__name__ for each in type(thing).__mro__}
    return not names.isdisjoint(
        {"FullyShardedDataParallel", "FSDPModule", "ZeroRedundancyOptimizer"}
    )


class State:
    """The state that all ranks have alike between two steps, and its last commits, kept in memory.
    Each keyword becomes an attribute. Modules, optimizers, schedulers and whatever has `state_dict`
    and `load_state_dict` are filled in place, as are tensors; of a sampler with `set_epoch` the
    epoch is kept; everything else is a value that pickle knows, and may be assigned anew. seed:
    torch's and Python's random generators are seeded at every commit from it, the number of the
    commit and this rank, so that a step that is done again draws the same numbers; None: not.
    Raises ValueError for what is sharded, which is for a ShardedState.
    """

    commits: int = 0
    """Number of commits of the job so far, the state at the beginning included; 0: none."""

    def __init__(self, *, seed: int | None = None, **things: Any) -> None:
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
        self._commits = (_Commit(), _Commit())
        self._current = 0
        self.commits = 0
        self._memory = _C._ElasticMemory()
        self._in_memory = False  # whether the last commit is there
        self._shards: ShardedState | None = None  # of this epoch

    def commit(self) -> None:
        """The end of a step, called by every rank after each, or after each tenth. Waits until all
        ranks have come; copies everything to the older of two places in memory. A commit that has
        returned on any rank that lives is never lost. Raises DistError as a collective does, and
        Preempted; `run` handles both.
        """
        number = self.commits + 1
        in_memory = _C.is_initialized() and self._commits_in_memory()
        # A part that no other rank has must be safe before any rank takes the commit for made.
        if in_memory:
            self._write(number)
        leave = _C.is_initialized() and _C._elastic_agree(number, False)
        if in_memory:
            self._made_in_memory(number)
        else:
            self._take(number)
        self._reseed()
        if leave:
            raise Preempted(f"this node is to be given up; commit {number} was its last")

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back to the last commit, and drops the gradients of the modules."""
        if self.commits == 0:
            raise ValueError("elastic.State.restore: there is no commit yet")
        if self._in_memory:
            shards = self._shards if self._shards and self._shards._restored else None
            self._fill_from(self._memory.last(), shards, self._memory.fill_here)
        else:
            self._put_back(self._commits[self._current].tree())
        self._reseed()

    def _before_leaving(self) -> None:
        # Without a commit of its own, a state that came from others is still as it came.
        if self._memory.has_last() if self._in_memory else self.commits > 0:
            self.restore()

    def _put_back(self, tree: dict[str, Any]) -> None:
        for name, kept in tree.items():
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

    def _commits_in_memory(self) -> bool:
        """Whether the next commit has shards in it."""
        if self._shards is None:
            if not self._in_memory:
                return False
            raise ValueError(
                "elastic.State.commit: commits before this one have sharded parts, and nothing "
                "sharded is bound now; make the elastic.ShardedState in every call of the function"
            )
        if not self._shards._restored:
            raise ValueError(
                "elastic.State.commit: an elastic.ShardedState is bound that has not been restored;"
                " call its restore() also in the first epoch"
            )
        return True

    @torch.no_grad()
    def _write(self, number: int) -> None:
        rest, tensors = _parted(self._tree())
        items = [(f"{_PREFIX}{i}", each, list(each.shape), None) for i, each in enumerate(tensors)]
        contents = self._shards._contents() if self._shards else None
        values = pickle.dumps(
            (rest, _kinds(tensors), json.dumps(contents.values() if contents else {}))
        )
        own = contents.items() if contents else []
        self._memory.write(number, _C._CheckpointItems(items + own), values, len(items))

    def _made_in_memory(self, number: int) -> None:
        self._memory.agreed()
        self.commits, self._in_memory = number, True
        self._commits = (_Commit(), _Commit())  # not needed any more

    @torch.no_grad()
    def _fill_from(
        self, commit: _C._ElasticCommit, shards: ShardedState | None, fill: Callable[..., None]
    ) -> None:
        rest, kinds, values = pickle.loads(commit.values)
        tensors = _memory_of(kinds)
        items = [(f"{_PREFIX}{i}", each, list(each.shape), None) for i, each in enumerate(tensors)]
        contents = None
        if shards is not None:
            contents = shards._contents()
            # A commit in memory has the format of new checkpoints, whose numbers begin with 1.
            index = types.SimpleNamespace(tensors=commit.tensors, values=values, number=1)
            items += contents.wanted(index)
        fill(commit, _C._CheckpointItems(items))
        self._put_back(_with_tensors(pickle.loads(rest), tensors))
        if contents is not None and shards is not None:
            contents.fill()
            shards._drop_gradients()

    def _tree(self) -> dict[str, Any]:
        def of(thing: Any) -> Any:
            if hasattr(thing, "load_state_dict"):
                return thing.state_dict()
            if hasattr(thing, "set_epoch") and not isinstance(thing, torch.Tensor):
                return thing.epoch
            return thing

        return {name: of(getattr(self, name)) for name in self._names}

    @torch.no_grad()
    def _take(self, number: int) -> None:
        self._commits[1 - self._current].take(self._tree(), number)
        self._turn()

    def _turn(self) -> None:
        self._current = 1 - self._current
        self.commits = self._commits[self._current].number

    def _reseed(self) -> None:
        if self._seed is None:
            return
        rank = _C.get_rank() if _C.is_initialized() else 0
        # A text: Python hashes it as a whole, so that neighbours are far from each other.
        chance = random.Random(f"{self._seed} {self.commits} {rank}")
        torch.manual_seed(chance.getrandbits(63))
        random.seed(chance.getrandbits(63))

    @torch.no_grad()
    def _from_survivors(self) -> None:
        """Each rank gets the last commit of the ranks that have any, else rank 0's state."""
        self._memory.adopt()
        if any(_gathered(self._memory.has_any())):
            commit = self._memory.find()
            if commit is not None:
                self._fill_from(commit, None, self._memory.fill)
                self.commits, self._in_memory = commit.number, True
                return self._reseed()
        if self._in_memory:
            self.commits, self._in_memory = 0, False
        rank, numbers = _C.get_rank(), _gathered(self.commits)
        if max(numbers) == 0:
            numbers[0] = 1
            if rank == 0:
                self._take(1)
        source = numbers.index(max(numbers))
        if min(numbers) < max(numbers):
            self._broadcast(source, rank == source)
        self.restore()

    def _broadcast(self, source: int, mine: bool) -> None:
        commit = self._commits[self._current if mine else 1 - self._current]
        told: list[Any] = [None]
        if mine:
            told = [(commit.number, commit.rest, _kinds(commit.tensors))]
        broadcast_object_list(told, src=source)
        number, rest, kinds = told[0]
        if not mine:
            commit.number = 0
            commit.tensors = _memory_of(kinds)
        for tensor in commit.tensors:
            _C.broadcast(tensor, src=source)
        if not mine:
            commit.rest, commit.number = rest, number
            self._turn()


def _gathered(mine: int) -> list[int]:
    """Every rank's, by rank."""
    gathered = torch.empty(_C.get_world_size(), dtype=torch.int64)
    _C.all_gather_into_tensor(gathered, torch.tensor([int(mine)]))
    return gathered.tolist()


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
        if state._shards is not None:
            raise ValueError(
                "elastic.ShardedState: the State has one already in this epoch; give everything "
                "sharded to that one"
            )
        self._state, self._things = state, things
        self._restored = False
        state._shards = self

    def restore(self) -> None:
        """Collective: puts everything, what the State has included, back to the last commit, and
        drops gradients. If the job has made none with shards, makes the first one, of what the
        ranks have. Raises DistError on all ranks if parts of the last commit are lost, with two
        neighbouring nodes at once.
        """
        state = self._state
        commit = state._memory.find()
        if commit is not None:
            state._fill_from(commit, self, state._memory.fill)
        number = max(1, state.commits) if commit is None else commit.number
        # From here on this epoch's ranks have this commit, whatever the ranks of earlier ones had.
        state._memory.begin_epoch(commit)
        state._write(number)
        _C._elastic_agree(number, True)
        state._made_in_memory(number)
        self._restored = True
        state._reseed()

    def _contents(self) -> Any:
        from .checkpoint.contents import Contents

        return Contents(self._things, _C.get_rank() if _C.is_initialized() else 0)

    def _drop_gradients(self) -> None:
        for each in self._things.values():
            if isinstance(each, torch.nn.Module):
                each.zero_grad()


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
    a group for which no further epoch comes within `repair_timeout`.
    """
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
        _C._elastic_agree(state.commits, True)
    except Preempted:
        return "preempted", None
    except Exception as error:
        # A commit that is lost or has no room ends training whatever has become of the epoch.
        lost = isinstance(error, _C.DistError) and error.code == "exhausted"
        if lost or not _C._elastic_epoch_is_over():
            raise
        # Its frames hold what `train` has made.
        error.__context__ = error.__cause__ = None
        return None, error.with_traceback(None)
    finally:
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
