# SPDX-License-Identifier: BSD-3-Clause
"""Streaming DiLoCo by stock torch alone, as the papers have it: arXiv:2311.08105, arXiv:2501.18512.
Compared with muster's in tests/python/local_sgd_stock_test.py and by `muster-lab replicas`.
"""

import torch
import torch.distributed as stock


class StockDiLoCo:
    """Over the default group of torch.distributed, which may be Gloo's. Call `step` after each step
    of the optimizer.

    fragments: lists of parameters of one dtype. Fragment f of n meets in the steps t with
    t % sync_every == (f + 1) * sync_every // n; the result is taken `delay` steps later, and `mix`
    is the share of its own values that a replica then keeps.
    """

    def __init__(self, fragments, sync_every, delay=0, mix=0.0):
        self.fragments = fragments
        self.sync_every, self.delay, self.mix = sync_every, delay, mix
        for each in (each for fragment in fragments for each in fragment):
            stock.broadcast(each.detach(), 0)
        self.outer = [[each.detach().clone() for each in fragment] for fragment in fragments]
        self.optimizers = [
            torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True) for outer in self.outer
        ]
        self.steps = 0
        self.under_way = {}  # by fragment: the step that takes it, the call, and the changes

    @torch.no_grad()
    def step(self):
        self.steps += 1
        count = len(self.fragments)
        for number in range(count):
            if self.under_way.get(number, (0,))[0] == self.steps:
                self.take(number)
            offset = (number + 1) * self.sync_every // count % self.sync_every
            if self.steps % self.sync_every == offset:
                self.send(number)
                if self.delay == 0:
                    self.take(number)

    def send(self, number):
        pairs = zip(self.outer[number], self.fragments[number], strict=True)
        changes = torch.cat([(outer - local).flatten() for outer, local in pairs])
        work = stock.all_reduce(changes, async_op=True)
        self.under_way[number] = self.steps + self.delay, work, changes

    def take(self, number):
        _, work, changes = self.under_way.pop(number)
        work.wait()
        outer = self.outer[number]
        changes /= stock.get_world_size()
        parts = changes.split([each.numel() for each in outer])
        for each, part in zip(outer, parts, strict=True):
            each.grad = part.view_as(each)
        self.optimizers[number].step()
        for local, each in zip(self.fragments[number], outer, strict=True):
            local.copy_(self.mix * local + (1 - self.mix) * each)
