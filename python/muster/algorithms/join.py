# SPDX-License-Identifier: BSD-3-Clause
"""Training with uneven inputs: a rank that has run out takes part in the others' collectives until
all have.

Names and calls are those of torch.distributed.algorithms.join.
"""

import warnings

import torch

import muster as dist

__all__ = ["Join", "Joinable", "JoinHook"]

MUCH_SKEW = 1000


class JoinHook:
    """The calls of a rank without inputs. An exception of one ends the Join."""

    def main_hook(self):
        """Once for each iteration of the ranks that still have inputs: the collectives that they
        make in it.
        """

    def post_hook(self, is_last_joiner):
        """Once, when all have run out. `is_last_joiner`: this rank was among the last to; at least
        one rank was.
        """


class Joinable:
    """A class that communicates in each iteration; before its collectives it calls
    `Join.notify_join_context(self)`.
    """

    _join = None  # the one it takes part in

    def join_hook(self, **kwargs):
        """A JoinHook; called once by each Join that is enabled, with its keyword arguments."""
        raise NotImplementedError

    @property
    def join_device(self):
        """Device of the few bytes that Join sends (torch.device); the first joinable's counts."""
        raise NotImplementedError

    @property
    def join_process_group(self):
        """The ranks that share the inputs: the same for all joinables of a Join."""
        raise NotImplementedError

    def end_of_inputs(self):
        """Called by Join when this rank has run out of inputs, before the first hook. To raise
        where the calls of the last iteration were not all made, for which other ranks wait; that
        ends the Join.
        """


class Join:
    """Inside of it ranks may run out of inputs at different times:

        with Join([model, optimizer]):
            for batch in my_share: ...

    joinables: at least one Joinable, each one's calls of an iteration in the same order on every
    rank. `enable=False`: every rank has as many inputs; nothing is watched.
    `throw_on_early_termination`: once a rank has run out, every rank raises a DistError that names
    it; else that rank shadows the others at the end of the block. The rest goes to each
    `join_hook`. Raises ValueError (DistArgumentError) for no joinable, one given twice or taking
    part in another Join, and several sets of ranks.
    """

    def __init__(self, joinables, enable=True, throw_on_early_termination=False, **kwargs):
        self._joinables = list(joinables)
        self._enable, self._throws = enable, throw_on_early_termination
        if not self._joinables:
            raise dist.DistArgumentError("Join needs at least one joinable")
        for place, each in enumerate(self._joinables):
            if not isinstance(each, Joinable):
                raise TypeError(f"Join: {type(each).__name__} is no Joinable")
            if any(each is other for other in self._joinables[:place]):
                raise dist.DistArgumentError("Join: a joinable is given twice")
            if each._join is not None:
                raise dist.DistArgumentError(
                    "Join: a joinable takes part in another Join that is not over"
                )
        groups = [each.join_process_group for each in self._joinables]
        self._group, self._device = groups[0], self._joinables[0].join_device
        self._ranks = dist.get_process_group_ranks(self._group)
        if any(dist.get_process_group_ranks(group) != self._ranks for group in groups):
            raise dist.DistArgumentError(
                "Join: the joinables' process groups have different ranks; make a Join for each "
                "set of ranks"
            )
        self._hooks = [each.join_hook(**kwargs) for each in self._joinables] if enable else []
        for each in self._joinables if enable else ():
            each._join = self

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if not self._enable:
            return
        # The hooks make the joinables' own calls, which are no inputs of this rank.
        self._leave()
        try:
            if kind is None:
                self._finish()
        finally:
            self._hooks = []

    @staticmethod
    def notify_join_context(joinable):
        """Called by a joinable before its collectives of an iteration: this rank still has inputs.
        The Work of what it sends; None outside a Join and for all joinables but the first. Does not
        block unless throw_on_early_termination is set; then raises what the ranks that have run out
        raise.
        """
        join = joinable._join
        return join._notify() if join is not None and join._joinables[0] is joinable else None

    def _flags(self, has_inputs):
        """One entry for each rank, so that every rank sees which ranks have run out."""
        flags = torch.zeros(len(self._ranks), dtype=torch.int32)
        flags[dist.get_rank(self._group)] = int(has_inputs)
        return flags.to(self._device)

    def _leave(self):
        for each in self._joinables:
            if each._join is self:
                each._join = None

    def _notify(self):
        flags = self._flags(True)
        if not self._throws:
            return dist.all_reduce(flags, group=self._group, async_op=True)
        dist.all_reduce(flags, group=self._group)
        if not flags.all():
            self._leave()
            self._stop(flags)
        return None

    def _finish(self):
        for each in self._joinables:
            each.end_of_inputs()
        is_last_joiner = True
        iteration = 0
        while True:
            flags = self._flags(False)
            dist.all_reduce(flags, group=self._group)
            if not flags.any():
                break
            if self._throws:
                self._stop(flags)
            is_last_joiner = False
            iteration += 1
            if iteration == MUCH_SKEW:
                warnings.warn(
                    f"this rank ran out of inputs more than {MUCH_SKEW} iterations before the "
                    "others; share the inputs more evenly, a rank "
                    "that only shadows does no work",
                    stacklevel=3,
                )
            for hook in self._hooks:
                hook.main_hook()
        for hook in self._hooks:
            hook.post_hook(is_last_joiner)

    def _stop(self, flags):
        out = [rank for rank, has in zip(self._ranks, flags.tolist()) if not has]
        names = ", ".join(map(str, out))
        error = dist.DistError(
            f"Join: rank {names} has run out of inputs while {len(self._ranks) - len(out)} of "
            f"{len(self._ranks)} ranks still have some, and "
            "throw_on_early_termination is set: every rank stops here. Give all ranks as many "
            "inputs, or leave throw_on_early_termination out"
        )
        error.ranks, error.code = out, "mismatch"
        raise error
