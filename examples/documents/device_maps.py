# SPDX-License-Identifier: BSD-3-Clause
"""The guide's options of RPC and its map of devices, both workers from one file."""

import os

import torch

from muster import rpc
from muster.rpc import TensorPipeRpcBackendOptions


# on both workers
def add(x, y):
    print(x)
    return x + y, (x + y).to(2)


def worker0():
    options = TensorPipeRpcBackendOptions(
        num_worker_threads=8,
        device_maps={"worker1": {0: 1}},
        # maps worker0's cuda:0 to worker1's cuda:1
    )
    options.set_device_map("worker1", {1: 2})
    # maps worker0's cuda:1 to worker1's cuda:2

    rpc.init_rpc(
        "worker0",
        rank=0,
        world_size=2,
        backend=rpc.BackendType.TENSORPIPE,
        rpc_backend_options=options,
    )

    x = torch.ones(2)
    rets = rpc.rpc_sync("worker1", add, args=(x.to(0), 1))
    # The first argument will be moved to cuda:1 on worker1. When
    # sending the return value back, it will follow the invert of
    # the device map, and hence will be moved back to cuda:0 and
    # cuda:1 on worker0
    print(rets[0])
    print(rets[1])
    rpc.shutdown()


def worker1():
    rpc.init_rpc(
        "worker1",
        rank=1,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=8,
            rpc_timeout=20,  # 20 second timeout
        ),
    )
    rpc.shutdown()


if __name__ == "__main__":
    worker0() if os.environ["RANK"] == "0" else worker1()
