# SPDX-License-Identifier: BSD-3-Clause
"""The warning of names that go: docs/user/compatibility.md has the policy."""

import warnings


def warn_deprecated(old: str, new: str, since: str, until: str, depth: int = 1) -> None:
    """Warns that `old` is deprecated since version `since`, that `new` takes its place, and how
    long the old name stays: `until` is a version, or words as "torch removes it".

    `depth`: how many calls lie between this one and the program's line, which the warning shows.
    """
    warnings.warn(
        f"{old} is deprecated since {since}: use {new}. It works until {until}.",
        FutureWarning,  # which Python shows wherever it comes from, unlike DeprecationWarning
        stacklevel=depth + 2,
    )
