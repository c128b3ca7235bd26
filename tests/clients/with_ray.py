# SPDX-License-Identifier: BSD-3-Clause
"""Ray Train: a TorchTrainer whose TorchConfig names the backend. Ray starts the workers."""

import json
import os
import tempfile

import ray
import ray.train
import ray.train.torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = os.path.dirname(os.path.abspath(__file__))


def work(config):
    import common
    import torch

    common.check_engine()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(common.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in common.part(rank, size):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        with open(config["path"], "w") as file:
            json.dump(torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), file)
    ray.train.report({})


environment = {
    name: os.environ[name] for name in ("CLIENT_ENGINE", "CLIENT_BACKEND") if name in os.environ
}
environment["PYTHONPATH"] = f"{HERE}:{os.environ['PYTHONPATH']}"
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "weights")
    TorchTrainer(
        work,
        train_loop_config={"path": path},
        torch_config=TorchConfig(backend=os.environ.get("CLIENT_BACKEND", "gloo")),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    with open(path) as file:
        print("RESULT", file.read(), flush=True)
ray.shutdown()
