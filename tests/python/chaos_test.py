# SPDX-License-Identifier: BSD-3-Clause
"""Random faults in jobs that must not notice them (tests/chaos/campaign.py): one round, or ten
minutes of them in `make test-long`.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

CAMPAIGN = pathlib.Path(__file__).parents[1] / "chaos" / "campaign.py"
LONG = os.environ.get("MUSTER_TEST_LONG")


# spec: L14 whatever is killed, stops or cannot be reached for a time: no safe step is lost, and no
# bit; L6 the final weights are those of a run without faults
def test_random_faults_go_unnoticed():
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("etcd") is None:
        pytest.skip("hosts as network namespaces need root and iproute2; the jobs meet in etcd")
    words = ["--seed", os.environ.get("MUSTER_TEST_SEED", "1"), "--minutes", "10"]
    words += [] if LONG else ["--rounds", "1"]
    done = subprocess.run([sys.executable, CAMPAIGN, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    totals = done.stdout.splitlines()[-1]
    assert re.match(r"totals: rounds=\d+ failed=0 faults=[1-9]", totals), totals
    wrong = "steps_lost=0 wrong_bits=0 hangs=0 leftovers=0 wrong_words=0 wrong_ends=0"
    assert totals.endswith(wrong), totals


# The totals of several campaigns add up to one line of the same form.
def test_totals_add_up(tmp_path):
    wrong = "steps_lost=7 wrong_bits=0 hangs=1 leftovers=0 wrong_words=0 wrong_ends=0"
    said = ["round 0 keep-ddp: 2 faults", f"totals: rounds=1 failed=1 faults=2 cut=2 {wrong}"]
    files = [tmp_path / "first", tmp_path / "second"]
    files[0].write_text("\n".join(said))
    files[1].write_text(f"totals: rounds=4 failed=0 faults=3 cut=1 slow=2 {wrong}\n")
    words = [sys.executable, CAMPAIGN, "--sum", *files]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == (
        "totals: rounds=5 failed=1 faults=5 cut=3 slow=2 steps_lost=14 wrong_bits=0 hangs=2 "
        "leftovers=0 wrong_words=0 wrong_ends=0\n"
    ), done.stderr
