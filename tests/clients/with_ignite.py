# SPDX-License-Identifier: BSD-3-Clause
"""ignite: idist's parallel run, auto_model and a metric over all ranks."""

import common
import ignite.distributed as idist
import torch
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import MeanSquaredError


def work(rank):
    common.check_engine()
    model = idist.auto_model(common.model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = common.part(idist.get_rank(), idist.get_world_size())
    create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss).run(
        batches, max_epochs=2
    )
    evaluator = create_supervised_evaluator(model, {"error": MeanSquaredError()})
    evaluator.run(batches)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    common.say([*weights, evaluator.state.metrics["error"]])


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(work)
