# SPDX-License-Identifier: BSD-3-Clause
"""Composer: a Trainer on CPUs, which trains over Gloo only and finds muster in its place."""

import os

import common
import torch

os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])  # the name that Composer reads

from composer import Trainer  # noqa: E402
from composer.core import Callback  # noqa: E402
from composer.models import ComposerModel  # noqa: E402
from composer.utils import dist  # noqa: E402


class Net(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = common.model()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


class CheckEngine(Callback):
    def fit_start(self, state, logger):
        common.check_engine()


net, data = Net(), common.data()
sampler = dist.get_sampler(data, shuffle=False)
trainer = Trainer(
    model=net,
    train_dataloader=torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler),
    optimizers=torch.optim.SGD(net.parameters(), lr=0.1),
    max_duration="2ep",
    device="cpu",
    callbacks=[CheckEngine()],
    progress_bar=False,
)
trainer.fit()
common.say(net.net)
