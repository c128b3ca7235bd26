# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    input_tensor_list = [torch.tensor([rank * size + i], dtype=torch.float32) for i in range(size)]
    output_tensor_list = [torch.zeros(1) for _ in range(4)]
    dist.all_to_all(output_tensor_list=output_tensor_list, input_tensor_list=input_tensor_list)
    print("Rank ", rank, " has input list ", input_tensor_list)
    print("Rank ", rank, " has output list ", output_tensor_list)
