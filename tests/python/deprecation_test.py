# SPDX-License-Identifier: BSD-3-Clause
"""Deprecated names: they work, they warn, and docs/user/compatibility.md says what they say."""

import contextlib
import io
import pathlib
import re
import warnings

import pytest

import muster as dist
from muster._deprecation import warn_deprecated

PAGE = (pathlib.Path(__file__).parents[2] / "docs/user/compatibility.md").read_text()
EXAMPLE, PRINTED = re.search(
    r"```python\n(import warnings\n.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL
).groups()


# spec: V11.deprecation the page's example runs and prints what the page shows
def test_example_of_the_page():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(EXAMPLE, "example", "exec"), {})
    assert printed.getvalue() == PRINTED


# spec: V11.deprecation a deprecated name works as before, and its warning shows the program's line
@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_deprecated_name_works_and_warns(name):
    with pytest.warns(FutureWarning, match="muster.reduce_op is deprecated") as caught:
        operation = getattr(dist.reduce_op, name)
    assert operation == getattr(dist.ReduceOp, name)
    assert [each.filename for each in caught] == [__file__]


# spec: V11.deprecation nothing else warns: the new name, and an old one that there never was
def test_nothing_else_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dist.ReduceOp.SUM != dist.ReduceOp.MAX
        assert not hasattr(dist.reduce_op, "AVG")
        with pytest.raises(AttributeError, match="has no AVG; muster.ReduceOp has"):
            _ = dist.reduce_op.AVG
        with pytest.raises(FutureWarning):
            _ = dist.reduce_op.SUM


# spec: V11.deprecation the sentence names both names and both versions, and the caller's caller
def test_sentence():
    def old_name():
        warn_deprecated("muster.old_name", "muster.new_name", since="0.2.0", until="0.5.0")

    said = "muster.old_name is deprecated since 0.2.0: use muster.new_name. It works until 0.5.0."
    with pytest.warns(FutureWarning, match=f"^{re.escape(said)}$") as caught:
        old_name()
    assert caught[0].filename == __file__
    assert caught[0].lineno == test_sentence.__code__.co_firstlineno + 6
