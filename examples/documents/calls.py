# SPDX-License-Identifier: BSD-3-Clause
"""The guide's calls to another worker, both workers from one file."""

import os

import torch

import muster.autograd as dist_autograd
from muster import rpc
from muster.nn.api.remote_module import RemoteModule


def caller():
    print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)))
    print(rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 3)).wait())
    rref1 = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
    rref2 = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    print(rref1.to_here() + rref2.to_here())

    rref = rpc.remote("worker1", torch.add, args=(torch.zeros(2, 2), 1))
    print(rref.remote().size().to_here())
    print(rref.remote().view(1, 4).to_here())
    print(rref.rpc_async().view(1, 4).wait())
    print(rref.rpc_sync().size())

    remote_linear_module = RemoteModule("worker1/cpu", torch.nn.Linear, args=(20, 30))
    print(remote_linear_module.forward_async(torch.randn(128, 20)).wait().shape)

    with dist_autograd.context() as context_id:
        t1 = torch.rand((3, 3), requires_grad=True)
        t2 = torch.rand((3, 3), requires_grad=True)
        loss = rpc.rpc_sync("worker1", torch.add, args=(t1, t2)).sum()
        dist_autograd.backward(context_id, [loss])
        grads = dist_autograd.get_gradients(context_id)
        print(grads[t1].tolist(), grads[t2].tolist())


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        caller()
    rpc.shutdown()
