# SPDX-License-Identifier: BSD-3-Clause
"""The reference's profile of a collective."""

import torch

import muster as dist

dist.init_process_group()
with torch.profiler.profile() as prof:
    tensor = torch.randn(20, 10)
    dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print(prof.key_averages().table(row_limit=20))
dist.destroy_process_group()
