# SPDX-License-Identifier: BSD-3-Clause
"""The tutorial's DataParallel: threads of one process, and no group."""

import torch

from muster.nn.parallel import DataParallel

model = torch.nn.Linear(10, 5)
input_var = torch.randn(20, 10)
expected = model(input_var)
count = torch.cuda.device_count()
net = DataParallel(model.to("cuda"), device_ids=[0, 1, 2][:count]) if count else DataParallel(model)
output = net(input_var)  # input_var can be on any device, including CPU
print(torch.allclose(output.cpu(), expected, atol=1e-3), tuple(output.shape))
