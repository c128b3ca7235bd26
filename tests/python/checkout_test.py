# SPDX-License-Identifier: BSD-3-Clause
"""What tests/upstream/checkout.py takes for red."""

import importlib.util
import pathlib

FILE = pathlib.Path(__file__).parents[1] / "upstream" / "checkout.py"
PASSED = ("passed", "")


def surprises(mine, theirs, reasons):
    spec = importlib.util.spec_from_file_location("checkout", FILE)
    checkout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checkout)
    reasons = {f"file.py::{name}": why for name, why in reasons.items()}
    return checkout.judge("sharded", "file.py", mine, theirs, False, reasons, "reasons.py")


# spec: A2 of torch's tests, a reason excuses a failure; never a test without an end, a process that
# ends, a test that passes, or one that is not there
def test_what_a_reason_excuses():
    beside, reason = {"Class.test": PASSED}, {"Class.test": "because"}
    assert not surprises(beside, beside, {})
    failed = {"Class.test": ("failed", "AssertionError")}
    assert surprises(failed, beside, {})
    assert not surprises(failed, beside, reason)
    assert not surprises(failed, failed, {})
    for broken in ("no end in 240 s", "its process ended with -11"):
        (said,) = surprises({"Class.test": ("failed", broken)}, beside, reason)
        assert broken in said
    (said,) = surprises(beside, beside, reason)
    assert "passes, and reasons.py says" in said
    (said,) = surprises(beside, beside, {"Class.other": "because"})
    assert "Class.other, which is no test" in said
    assert not surprises(beside, {}, {"Class.other": "because"})  # single tests were asked for


# spec: A2 a reason for a test that fails on stock torch too is named
def test_idle_reasons_are_named(capsys):
    failed = {"Class.test": ("failed", "AssertionError")}
    assert not surprises(failed, failed, {"Class.test": "because"})
    assert "NOTE: Class.test" in capsys.readouterr().out
