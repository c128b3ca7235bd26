# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed: ZeRO 1 to 3, by init_distributed's option."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import common
import deepspeed
import torch

deepspeed.init_distributed(dist_backend=common.NAMED, auto_mpi_discovery=False)
common.check_engine()
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
found = []
for stage in (1, 2, 3):
    model = common.model()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    for x, y in common.part(rank, size):
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    found.append(total.item())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        found += torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
common.say(found)
