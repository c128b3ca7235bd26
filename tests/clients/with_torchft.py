# SPDX-License-Identifier: BSD-3-Clause
"""torchft: its reconfigurable group, made of torch's class of that name, and made again with fewer
ranks.
"""

import os

import common
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions
from torchft.process_group import ProcessGroupGloo, reconfigure_with_store

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = int(os.environ["MASTER_PORT"]) + 1
store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
group = ProcessGroupGloo(timeout=torch.distributed.default_pg_timeout)
found = []
for epoch in range(2):  # a quorum each
    reconfigure_with_store(group, f"localhost:{port}/{epoch}", rank, size)
    common.check_engine(group._pg)
    x = torch.arange(4.0) * (rank + 1 + epoch)
    group.allreduce([x], dist.ReduceOp.SUM).wait()
    parts = [[torch.zeros(4) for _ in range(size)]]
    group.allgather(parts, [x + rank], AllgatherOptions()).wait()
    group.broadcast_one(x, root=1).wait()
    found += x.tolist() + torch.cat(parts[0]).tolist()
store.set(f"done{rank}", "")
store.wait([f"done{each}" for each in range(size)])
common.say(found, rank)
if rank == 0:
    store.get("left") if size > 1 else None
else:
    store.set("left", "")
