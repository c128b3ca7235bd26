# SPDX-License-Identifier: BSD-3-Clause
"""Tests of torch's suites that do not pass on muster, and why."""

import functools
import os
import re
import time

# Which name torch expects; with another, the test runs in another way. In the way "replaced" that
# is a reason only where Gloo skips it too.
PINNED = 'pinned to names of backends; runs "widened" or "replaced", as far as Gloo can do it'
# The message of a skipped test -> why it is skipped.
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


def _each(reason, file, *tests):
    return {f"{file}::{test}": reason for test in tests}


_TEXT = "wants torch's text of the error; muster's names the key, the port or the ranks too"
_KEYS = "counts a key of torch's own; muster counts the users' alone"
_UV = "asks for torch's server with libuv"
_INSIDE = "looks at the insides of torch's stores"
_STORE = "test_store.py"
# Tests of the files that checkout.py runs that fail where Gloo passes: way -> file::Class.test ->
# why.
CHECKOUT = {
    "torchrun": {},
    "replaced": _each(
        "a backend that is not torch's own has the name custom to a group's C++",
        "test_c10d_common.py",
        "ProcessGroupWithDispatchedCollectivesTests.test_init_process_group_for_all_backends",
    ),
    "package": {
        **_each(
            _TEXT,
            _STORE,
            *(
                f"{kind}StoreTest.test_simple_wait"
                for kind in ("File", "Hash", "LibUvTCP", "PrefixFile", "PrefixTCP", "TCP")
            ),
            *(
                f"{kind}TCPStoreTest.{test}"
                for kind in ("", "LibUv")
                for test in (
                    "test_address_already_in_use",
                    "test_store_timeout_on_missing_clients",
                    "test_world_size_0_raises",
                )
            ),
            "RendezvousFileTest.test_common_errors",
            "RendezvousTCPTest.test_common_errors",
            "RendezvousTCPTest.test_dns_timeout",
            "RendezvousTCPTest.test_tcp_store_timeout_doest_break_client",
            "RendezvousTCPTest.test_tcp_store_timeout_set",
        ),
        **_each(
            _KEYS,
            _STORE,
            *(
                f"{kind}StoreTest.test_set_get_check"
                for kind in ("File", "PrefixFile", "PrefixTCP")
            ),
        ),
        **_each(
            _UV,
            _STORE,
            *(
                f"LibUvTCPStoreTest.{test}"
                for test in (
                    "test_append",
                    "test_multi_get",
                    "test_multi_set",
                    "test_multi_worker_with_fixed_world_size",
                    "test_multi_worker_with_nonfixed_world_size",
                    "test_multitenancy",
                    "test_take_over_listen_socket",
                )
            ),
            "InitPgWithNonUvStore.test_with_env_var",
            "InitPgWithNonUvStore.test_with_url_param",
            "RendezvousTCPTest.test_tcp_store_url_with_libuv",
        ),
        **_each(
            _INSIDE,
            _STORE,
            "LibUvTCPStoreTest.test_repr",
            "PythonStoreTest.test_set_get",
            "TCPStoreTest.test_repr",
            "TestClientProtocol.test_client_connect",
            *(
                f"TestMultiThreadedWait.test_wait_{kind}"
                for kind in (
                    "file_store",
                    "hash_store",
                    "prefix_file_store",
                    "tcp_store",
                    "tcp_store_uv",
                )
            ),
        ),
        **_each(
            "a class derived from Store needs set, get and the like; what it lacks is an error",
            _STORE,
            *(
                f"TestPythonStore.test_{test}"
                for test in (
                    "extended_methods_fallbacks",
                    "has_extended_api_passthrough",
                    "multi_get_roundtrip",
                    "optional_methods_fail",
                )
            ),
        ),
        **_each(
            "the file goes with the first of more users than world_size",
            _STORE,
            "FileStoreTest.test_refcount",
        ),
        **_each(
            "sets _transports on RPC's options, which the constructor alone takes",
            _STORE,
            "FileStoreTest.test_init_pg_and_rpc_with_same_file",
        ),
        **_each(
            "arguments beside the same in the URL are taken where they agree",
            _STORE,
            "RendezvousTest.test_url_with_node_params",
        ),
    },
}
