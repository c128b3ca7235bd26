# SPDX-License-Identifier: BSD-3-Clause
"""`muster run --rdzv-backend kubernetes --elastic keep` against the tests' fake of the API."""

import signal

from elastic_jobs import STEPS, TRAINER, Launcher, rendezvous, replace_killed, train, weights
from kubernetes_api import kubernetes_api


# spec: R3 Lease membership: the node of rank 0 dies in the middle of training, the others go on,
# and the weights are those of a run that nobody disturbs
def test_training_goes_on():
    with kubernetes_api() as (endpoint, environment):
        options = rendezvous("kubernetes", endpoint, "zero", "2")
        words = (TRAINER, str(STEPS), "9:0:update:10:host")

        def start():
            return Launcher(*words, ranks=2, options=options, environment=environment)

        nodes = replace_killed(start, 2)
    told = "".join(each.told() for each in nodes)
    out = "".join(each.out for each in nodes)
    assert [each.process.returncode for each in nodes] == [-signal.SIGKILL, 0, 0], told
    assert "LOST" not in out, told
    assert weights(out, 4) == weights(train(ranks=4).out, 4), told
