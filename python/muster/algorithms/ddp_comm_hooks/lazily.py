# SPDX-License-Identifier: BSD-3-Clause
"""A result that is computed by who waits for it."""


class Lazily:
    """A communication hook may return it in place of a future: `function()` runs at the first
    `wait()`, at backward's end and on its thread, where it may communicate.
    """

    def __init__(self, function):
        self._function = function
        self._value = None

    def wait(self):
        """The value; the first call computes it, and raises what that raises."""
        if self._function is not None:
            self._value = self._function()
            self._function = None
        return self._value

    value = wait

    def then(self, function):
        """As a future's: `function(self)` once this is there."""
        return Lazily(lambda: (self.wait(), function(self))[1])


def lazily(function):
    """`Lazily(function)`."""
    return Lazily(function)
