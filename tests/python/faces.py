# SPDX-License-Identifier: BSD-3-Clause
"""The two faces that tests run alike: stock torch on backend muster, and muster's own package."""

import datetime
import faulthandler

import torch
import torch.distributed
from ranks import LIMIT_S, meeting_file, run_ranks

import muster
import muster.torch
from muster.nn.parallel import DistributedDataParallel

FACES = ["torch", "muster"]
WAIT = datetime.timedelta(seconds=60)


class Face:
    """The functions of one face, and its DDP."""

    def __init__(self, name, rank, size, meeting):
        self.is_own = name == "muster"
        self.dist = muster if self.is_own else torch.distributed
        store = self.dist.FileStore(meeting, size)
        self.dist.init_process_group(
            None if self.is_own else "muster", store=store, rank=rank, world_size=size, timeout=WAIT
        )

    def train(self, net, hook=None, state=None, steps=10, **options):
        """The losses and the weights, after training a copy on data of this rank's own."""
        net = (
            DistributedDataParallel(net, **options)
            if self.is_own
            else torch.nn.parallel.DistributedDataParallel(net, **options)
        )
        if hook is not None:
            net.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        losses = []
        generator = torch.Generator().manual_seed(self.dist.get_rank())
        for _ in range(steps):
            x = torch.randn(16, 24, generator=generator)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), x[:, :8].tanh())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, torch.nn.utils.parameters_to_vector(net.parameters()).tolist()

    def sum_later(self, value, group=None):
        """The future of an all_reduce."""
        return self.dist.all_reduce(value, group=group, async_op=True).get_future()


def model(layers=4):
    torch.manual_seed(1)
    widths = [24] * layers + [8]
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])))


def on_ranks(size, face, body, *arguments):
    meeting = meeting_file()

    def rank_body(rank):
        faulthandler.dump_traceback_later(LIMIT_S / 4, exit=True)
        known = Face(face, rank, size, meeting)
        result = body(known, rank, size, *arguments)
        known.dist.destroy_process_group()
        return result

    return run_ranks(size, rank_body)
