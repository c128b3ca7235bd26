# SPDX-License-Identifier: BSD-3-Clause
"""Fully sharded training and how it is saved, of the training tutorial, on digits instead of the
tutorial's own data.
"""

import argparse
import os
import pathlib
import tempfile

import torch
import torch.nn.functional as F
import torch.optim as optim

import muster as dist
from muster.fsdp import FullyShardedDataParallel as FSDP
from muster.utils.data import DistributedSampler

DIGITS = pathlib.Path(__file__).parents[1] / "data/digits.csv"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, 1)
        self.fc1 = torch.nn.Linear(16 * 6 * 6, 64)
        self.fc2 = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits():
    rows = torch.tensor(
        [
            [float(word) for word in line.split(",")]
            for line in DIGITS.read_text().splitlines()
            if line[:1].isdigit()
        ]
    )
    return torch.utils.data.TensorDataset(rows[:, :-1].view(-1, 1, 8, 8) / 16, rows[:, -1].long())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-model", default=os.path.join(tempfile.gettempdir(), "mnist_cnn.pt"))
    args = parser.parse_args()
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = digits()
    sampler = DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)

    model = Net()
    model = FSDP(model)

    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ddp_loss = torch.zeros(2)
        for data_, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data_), target, reduction="sum")
            loss.backward()
            optimizer.step()
            ddp_loss += torch.tensor([loss.item(), len(data_)])
        dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"Train Epoch: {epoch} \tLoss: {ddp_loss[0] / ddp_loss[1]:.6f}")

    if args.save_model:
        # use a barrier to make sure training is done on all ranks
        dist.barrier()
        states = model.state_dict()
        if rank == 0:
            torch.save(states, args.save_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
