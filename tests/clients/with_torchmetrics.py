# SPDX-License-Identifier: BSD-3-Clause
"""torchmetrics: states of metrics, of one size and of several, gathered over the ranks."""

import common
import torch.distributed as dist
from torchmetrics import CatMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

dist.init_process_group(common.NAMED)
common.check_engine()
rank, size = dist.get_rank(), dist.get_world_size()
metrics = MetricCollection([MeanSquaredError()])
accuracy, everything = MulticlassAccuracy(4), CatMetric()
for step, (x, y) in enumerate(common.part(rank, size)):
    metrics.update(x[:, :2].contiguous(), y.contiguous())
    accuracy.update(x[:, :4], (y[:, 0] > 0).long() + rank)
    everything.update(x[: rank + 1 + step % 2, 0])  # as many as this rank has
values = [metrics.compute()["MeanSquaredError"].item(), accuracy.compute().item()]
common.say(values + everything.compute().tolist())
dist.barrier()
dist.destroy_process_group()
