# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small net on handwritten digits with any number of processes:

    muster run --standalone --nproc-per-node 4 digits.py [FOLDER]

FOLDER has digits.csv (examples/data, the default). Every rank works on its share of each batch, and
DistributedDataParallel averages the gradients.
"""

import csv
import pathlib
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import muster as dist
from muster.nn.parallel import DistributedDataParallel
from muster.utils.data.distributed import DistributedSampler

BATCH, EPOCHS = 64, 30
DATA = pathlib.Path(__file__).resolve().parents[1] / "data"


def load_digits(folder):
    """Images of 8 x 8 from 0 to 1, and what they show."""
    with open(folder / "digits.csv") as file:
        rows = torch.tensor([[float(each) for each in row] for row in csv.reader(file)])
    return rows[:, :64] / 16, rows[:, 64].long()


def main(folder):
    torch.set_num_threads(1)  # the ranks are the parallelism
    dist.init_process_group()
    images, labels = load_digits(folder)
    held_out = torch.arange(len(labels)) % 5 == 4
    train = TensorDataset(images[~held_out], labels[~held_out])
    sampler = DistributedSampler(train, seed=7)
    loader = DataLoader(train, batch_size=BATCH // dist.get_world_size(), sampler=sampler)

    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, wanted in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), wanted)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}/{EPOCHS}  loss {total:.4f}", flush=True)

    with torch.no_grad():
        right = (net(images[held_out]).argmax(1) == labels[held_out]).float().mean()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, held-out accuracy {100 * right:.2f} %", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else DATA)
