# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of a group: functions that see its calls. Importing this module gives ProcessGroup the
methods that register them.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._C import ProcessGroup as Group
from .options import HookOpName, PostHookArgs, PreHookArgs

_REGISTERING = threading.Lock()


class _Hooks:
    """The hooks of one group, by the ids they were registered with. The extension calls `call`,
    `submitted` and `aborted`.
    """

    def __init__(self) -> None:
        self.before: dict[int, Callable[[PreHookArgs], None]] = {}
        self.after: dict[int, Callable[[PostHookArgs], None]] = {}
        self.on_abort: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)

    def call(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], async_op: bool, root: int
    ) -> int:
        number = next(self._numbers)  # counted while there are hooks
        for hook in list(self.before.values()):
            hook(PreHookArgs(_kind(name), number, async_op, inputs, outputs, root))
        return number

    def submitted(self, number: int, name: str, async_op: bool, work: Any) -> None:
        for hook in list(self.after.values()):
            hook(PostHookArgs(_kind(name), number, async_op, work))

    def aborted(self) -> None:
        for hook in list(self.on_abort.values()):
            hook()


def _kind(name: str) -> HookOpName:
    try:
        return HookOpName({"isend": "send", "irecv": "recv"}.get(name, name))
    except ValueError:
        return HookOpName.UNKNOWN


def _hooks_of(group: Group) -> _Hooks:
    with _REGISTERING:
        if group._hooks is None:
            group._hooks = _Hooks()
            group._show_calls(False)
        return group._hooks


def _register(group: Group, kind: str, hook_id: int, hook: Callable[..., None]) -> None:
    hooks = _hooks_of(group)
    with _REGISTERING:
        getattr(hooks, kind)[hook_id] = hook
        group._show_calls(True)


def _unregister(group: Group, kind: str, hook_id: int) -> None:
    """Without hooks, calls take the path they take on a group that never had one."""
    hooks = _hooks_of(group)
    with _REGISTERING:
        del getattr(hooks, kind)[hook_id]
        group._show_calls(bool(hooks.before or hooks.after))


def register_pre_hook(self: Group, hook_id: int, hook: Callable[[PreHookArgs], None]) -> None:
    """Runs `hook` before each call of this group starts, on the thread that makes it. The call
    raises the hook's exceptions.
    """
    _register(self, "before", hook_id, hook)


def unregister_pre_hook(self: Group, hook_id: int) -> None:
    """Raises KeyError if no hook has that id."""
    _unregister(self, "before", hook_id)


def register_post_hook(self: Group, hook_id: int, hook: Callable[[PostHookArgs], None]) -> None:
    """Runs `hook` after each call of this group: once a synchronous call has succeeded, or an
    asynchronous one has started.
    """
    _register(self, "after", hook_id, hook)


def unregister_post_hook(self: Group, hook_id: int) -> None:
    """Raises KeyError if no hook has that id."""
    _unregister(self, "after", hook_id)


def register_abort_hook(self: Group, hook_id: int, hook: Callable[[], None]) -> None:
    """Runs `hook` when this process has aborted the group, on any thread; its calls end whether
    the hook returns or not. Python prints what it raises.
    """
    _hooks_of(self).on_abort[hook_id] = hook


def unregister_abort_hook(self: Group, hook_id: int) -> None:
    """Raises KeyError if no hook has that id."""
    del _hooks_of(self).on_abort[hook_id]


for _method in (
    register_pre_hook,
    unregister_pre_hook,
    register_post_hook,
    unregister_post_hook,
    register_abort_hook,
    unregister_abort_hook,
):
    setattr(Group, _method.__name__, _method)
setattr(Group, "supports_abort_hooks", property(lambda self: True))
