"""What of torch's suites does not pass on muster, and why."""

import functools
import os
import re
import time

# Which name torch expects; with another, the test runs in another way. In the way "replaced" that
# is a reason only where Gloo skips it too.
PINNED = 'pinned to names of backends; runs "widened" or "replaced", as far as Gloo can do it'
# What a skipped test says -> why it is skipped.
SKIPPED = {
    r"^Need at least \d+ accelerator|^accelerator is not available": "needs a GPU for each rank",
    r"(Only|only) (Nccl|NCCL)|^NCCL|^Nccl|\{'nccl'\}|^Coalescing manager": "is about NCCL",
    r"https://github.com/pytorch|^Test is failing, see": (
        "torch skips it on every backend: it fails by itself"
    ),
    r"^no torchvision": "needs torchvision",
    r"world size of 4$": "wants 4 ranks, and has them in the world of 4",
    r"^Skipped due to small world size": "wants 8 ranks, and has them in the world of 8",
    r"Only MPI supports": 'pinned to the name of MPI; passes in the way "as_mpi"',
    r"Gloo|gloo|GLOO|ucc|DistributedDataParallel|communication hook"
    r"|creating subgroups|get_future": PINNED,
    r"does not support (CPU tensors|isend|irecv)": "is about NCCL",
}

# Way -> test -> why it fails.
FAILS = {
    "muster": {
        "test_ddp_logging_data_cpu": "DDP's log calls every backend that is not torch's own "
        '"custom"',
    },
    "widened": {
        test: "the test makes its model only where its own list of names has the backend's"
        for test in (
            "test_accumulate_gradients_no_sync",
            "test_accumulate_gradients_no_sync_allreduce_hook",
            "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
            "test_accumulate_gradients_no_sync_grad_is_view",
        )
    },
    "as_mpi": {},
    "replaced": {},
    "beside_rpc": {},
    "gloo": {},
}
FAILS["widened"] |= FAILS["muster"]
FAILS["as_mpi"] |= FAILS["muster"]


def reason(way, test, kind, text):
    """Why `test` does not pass; None where nothing is known of it."""
    if kind != "skipped":
        return FAILS[way].get(test)
    return next((why for said, why in SKIPPED.items() if re.search(said, text)), None)


@functools.cache
def seed():
    return int(os.environ.get("MUSTER_TEST_SEED") or time.time())
