# SPDX-License-Identifier: BSD-3-Clause
"""Training over slow links: replicas train alone and meet every so many steps.

A replica is one rank, or several that share a model by DDP, FSDP or tensor parallelism. A meeting
averages over the replicas what each has changed since the last one; `group` has the ranks that hold
in their replicas what this one holds in its own. docs/user/local-sgd.md says when to use it.
"""

import datetime
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import _C
from ._C import ProcessGroup

__all__ = ["DiLoCo", "LocalSgd", "fragments_of"]

_Parameters = torch.nn.Module | Iterable[Tensor]


def fragments_of(module: torch.nn.Module, count: int) -> list[list[Tensor]]:
    """The module's parameters in `count` fragments of about equal work: modules that have
    parameters of their own are dealt out by turns, so that each fragment has some of every depth.
    """
    if count < 1:
        raise _C.DistArgumentError("fragments_of: count must be at least 1")
    seen: set[int] = set()
    layers = []
    for part in module.modules():
        own = [each for each in part.parameters(recurse=False) if id(each) not in seen]
        seen.update(map(id, own))
        if own:
            layers.append(own)
    if len(layers) < count:
        raise _C.DistArgumentError(
            f"fragments_of: the module has {len(layers)} layers with parameters, which make no "
            f"{count} fragments; give a smaller count"
        )
    return [[each for layer in layers[number::count] for each in layer] for number in range(count)]


def _local(parameter: Tensor) -> Tensor:
    """What this rank holds of it."""
    return getattr(parameter, "_local_tensor", parameter)


def _find(meetings: _C._ReplicaMeetings, sharded: list[tuple[int, Tensor]]) -> None:
    """Shows the meetings what this rank holds now of the parameters that are DTensors."""
    for number, parameter in sharded:
        meetings.replace(number, _local(parameter))


def _step(
    meetings: _C._ReplicaMeetings, sharded: list[tuple[int, Tensor]], tokens: int = 1
) -> None:
    _find(meetings, sharded)
    meetings.step(tokens)


class _Meets:
    """What LocalSgd and DiLoCo share."""

    def __init__(
        self,
        fragments: list[list[Tensor]],
        optimizer: Optimizer | None,
        group: ProcessGroup | None,
        sync_every: int,
        delay: int,
        mix: float,
        compression: str | None,
        error_feedback: bool,
        sync_period: datetime.timedelta | None,
        by_tokens: bool,
        joins: bool,
        refusal: str = "",
    ) -> None:
        if by_tokens and optimizer is not None:
            refusal = refusal or "with by_tokens give no optimizer, and call step(tokens) yourself"
        self._meetings = _C._ReplicaMeetings(
            type(self).__name__,
            [[_local(each) for each in fragment] for fragment in fragments],
            group,
            sync_every,
            delay,
            mix,
            compression,
            error_feedback,
            refusal,
            sync_period,
            by_tokens,
            joins,
        )
        numbered = enumerate(each for fragment in fragments for each in fragment)
        self._sharded = [(number, each) for number, each in numbered if _local(each) is not each]
        self._hook = None

    def _begin(self, optimizer: Optimizer | None) -> None:
        """Ends the construction. A failed one leaves no hook."""
        self._meetings.enter()
        if optimizer is not None:
            meetings, sharded = self._meetings, self._sharded  # no reference to this object
            self._hook = optimizer.register_step_post_hook(lambda *_: _step(meetings, sharded))

    def step(self, tokens: int = 1) -> None:
        """After each step of the optimizer, unless that was given and calls it, with the tokens, or
        samples, that the step was made of. Blocks in a meeting. Raises DistError as a collective
        does.
        """
        _step(self._meetings, self._sharded, tokens)

    def set_group(self, group: ProcessGroup | None) -> None:
        """Collective over `group`, after the old one has failed, or so that replicas join or leave:
        from now on its members meet. Members that have met before call this; a new replica
        constructs an object with the group instead, with the same options. The replicas that
        have taken the most averages give their outer state, a part each, to those that differ.
        Changes since the last meeting are not lost: the next one has them.
        """
        _find(self._meetings, self._sharded)
        self._meetings.set_group(group)

    def admit(self, wider: ProcessGroup) -> None:
        """Lets new replicas join while this one and the others that meet train on. All of these
        call it, at any of their steps; it returns at once. `wider` has the members of the group
        that meets and the new replicas, is made for this (not the default group), and has a timeout
        that is longer than the time from one meeting to the next; the new ones construct an object
        with it and joins=True, with the same options otherwise. They take the outer state, a part
        from each, and the averages of the meetings that follow, and take part once they have all of
        them: `group` is then `wider`.

        No step waits for a new replica. If one is lost before, refuses what it is sent, needs
        longer than the timeout, or is 64 meetings behind, none is admitted: `wider` is aborted, and
        the others go on as they were, with a warning in the log. Another attempt needs another
        group.
        For replicas of one rank; those of several join by `set_group`.
        """
        self._meetings.admit(wider)

    @property
    def is_admitting(self) -> bool:
        """Whether new replicas are on their way."""
        return self._meetings.is_admitting

    @property
    def group(self) -> ProcessGroup:
        """The replicas that meet next."""
        return self._meetings.group

    def remove(self) -> None:
        """The optimizer's steps are counted no longer."""
        if self._hook is not None:
            self._hook.remove()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def tokens(self) -> int:
        """Those of all replicas that meetings, of the first fragment, have counted so far: the same
        on every replica. By the clock, train while it is less than the budget, and all end with the
        same meeting.
        """
        return self._meetings.tokens

    @property
    def steps(self) -> int:
        return self._meetings.steps

    @property
    def meetings(self) -> int:
        """How many there have been; one of each fragment counts as one."""
        return self._meetings.meetings

    def state_dict(self) -> dict[str, Any]:
        """Copies of what is needed, beside the parameters and the inner optimizer's state, to go
        on; a meeting that goes on is part of it.
        """
        return {"meetings": dict(self._meetings.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leaves everything as it was where it raises DistArgumentError, for a state of other
        parameters, fragments or options.
        """
        self._meetings.load_state_dict(list(state["meetings"].items()))


class LocalSgd(_Meets):
    """Averages the parameters of all replicas every `sync_every` steps.

    Collective: all replicas begin with the values of the group's first, and give the same
    parameters and options. With `optimizer`, each of its steps counts; else call `step` after each.
    With sync_period, replicas meet by the clock, at the end of a step, whatever number of steps
    each has made; with by_tokens, what each has changed counts by the tokens that it gave to
    `step`.
    joins: this replica is new, and those that train admit it to `group`; see `admit`. It alone
    waits.
    compression: "bf16", "int8", "int4", of the changes that travel; what rounding has lost in one
    meeting is added in the next, unless error_feedback is False. Buffers are not averaged.
    """

    def __init__(
        self,
        parameters: _Parameters,
        optimizer: Optimizer | None = None,
        *,
        sync_every: int = 100,
        group: ProcessGroup | None = None,
        compression: str | None = None,
        error_feedback: bool = True,
        sync_period: datetime.timedelta | None = None,
        by_tokens: bool = False,
        joins: bool = False,
    ) -> None:
        if isinstance(parameters, torch.nn.Module):
            parameters = parameters.parameters()
        super().__init__(
            [list(parameters)],
            optimizer,
            group,
            sync_every,
            0,
            0.0,
            compression,
            error_feedback,
            sync_period,
            by_tokens,
            joins,
        )
        outer = self._meetings.outer_parameters

        def take_averages() -> None:
            for each in outer:
                if each.grad is not None:
                    each.sub_(each.grad)

        self._meetings.set_update(take_averages)
        self._begin(optimizer)


class DiLoCo(_Meets):
    """As LocalSgd; an outer optimizer takes the averages for gradients of the parameters of the
    last meeting.

    parameters: a module, of which `fragments` are made by `fragments_of`, or lists of tensors, one
    for each fragment. Fragment f of n meets in the steps t with
    t % sync_every == (f + 1) * sync_every // n; its result is taken `delay` steps later, while the
    replicas train on; `mix` is the share of its own values that a replica then keeps.
    outer_optimizer makes an optimizer of torch's of a list of parameters; None: SGD with Nesterov
    momentum 0.9 and a rate of 0.7. All replicas have the same bits in the outer parameters.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | list[list[Tensor]],
        optimizer: Optimizer | None = None,
        outer_optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
        *,
        fragments: int = 1,
        sync_every: int = 500,
        delay: int = 0,
        mix: float = 0.0,
        group: ProcessGroup | None = None,
        compression: str | None = None,
        error_feedback: bool = True,
        sync_period: datetime.timedelta | None = None,
        by_tokens: bool = False,
        joins: bool = False,
    ) -> None:
        refusal = ""
        if isinstance(parameters, torch.nn.Module):
            try:
                parameters = fragments_of(parameters, fragments)
            except _C.DistArgumentError as why:  # is raised by all members together
                parameters, refusal = [], str(why)
        super().__init__(
            parameters,
            optimizer,
            group,
            sync_every,
            delay,
            mix,
            compression,
            error_feedback,
            sync_period,
            by_tokens,
            joins,
            refusal,
        )
        outer = self._meetings.outer_parameters
        self.outer_optimizer = (
            torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
            if outer_optimizer is None
            else outer_optimizer(outer)
        )
        self._meetings.set_update(self.outer_optimizer.step)
        self._share_optimizer()
        self._begin(optimizer)

    def _share_optimizer(self) -> None:
        optimizer = self.outer_optimizer  # no reference to this object, which holds the meetings

        def save() -> Tensor:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

        def load(state: Tensor) -> None:
            file = io.BytesIO(state.numpy().tobytes())
            optimizer.load_state_dict(torch.load(file, weights_only=True))

        self._meetings.share_optimizer(save, load)

    def set_group(self, group: ProcessGroup | None) -> None:
        super().set_group(group)
        self._share_optimizer()

    set_group.__doc__ = _Meets.set_group.__doc__

    @property
    def outer_parameters(self) -> list[Tensor]:
        """Of the last meetings, in the order of the fragments. Those of float16 and bfloat16 are
        float32 here.
        """
        return self._meetings.outer_parameters

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "outer_optimizer": self.outer_optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = self.outer_optimizer.state_dict()
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        try:
            super().load_state_dict(state)
        except BaseException:
            self.outer_optimizer.load_state_dict(before)
            raise
