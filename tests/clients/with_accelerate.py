# SPDX-License-Identifier: BSD-3-Clause
"""accelerate: Accelerator, prepare, backward, gather."""

import common
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
common.check_engine()
model = common.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(common.data(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen = []
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(accelerator.gather(loss.detach()[None]).mean().item())
accelerator.wait_for_everyone()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
common.say(weights + seen)
accelerator.end_training()
