# SPDX-License-Identifier: BSD-3-Clause
"""Random faults in jobs that must not notice them (tests/chaos/campaign.py): one round, or ten
minutes of them in `make test-long`.
"""

import os
import pathlib
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
