# SPDX-License-Identifier: BSD-3-Clause
"""The parts of torch's modules that training libraries use beside the wrapper itself:
SyncBatchNorm, hooks, averages of parameters, functional collectives.
"""

import copy
from collections import OrderedDict

import pytest
import torch
from thread_ranks import on_threads, same

import muster as dist
from muster import _functional_collectives as funcol
from muster.algorithms import ddp_comm_hooks
from muster.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from muster.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from muster.algorithms.model_averaging import averagers, hierarchical_model_averager, utils
from muster.nn import SyncBatchNorm
from muster.nn.parallel import DistributedDataParallel
from muster.optim import PostLocalSGDOptimizer, _apply_optimizer_in_backward

INPUTS, WEIGHTS = torch.randn(8, 3, 5), torch.randn(8, 3, 5)


def linear():
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    return model


# spec: U3 SyncBatchNorm on the CPU: the statistics, outputs and gradients of one process
@pytest.mark.parametrize("momentum", [0.1, None])
def test_sync_batch_norm_is_batch_norm_of_all_ranks(momentum):
    whole = torch.nn.BatchNorm1d(3, momentum=momentum)
    x = INPUTS.clone().requires_grad_()
    expected = whole(x)
    (expected * WEIGHTS).sum().backward()

    def body(rank, size):
        model = SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3, momentum=momentum))
        assert type(model) is SyncBatchNorm
        mine = slice(0, 3) if rank == 0 else slice(3, 8)
        part = INPUTS[mine].clone().requires_grad_()
        output = model(part)
        (output * WEIGHTS[mine]).sum().backward()
        torch.testing.assert_close(output, expected[mine])
        torch.testing.assert_close(part.grad, x.grad[mine])
        torch.testing.assert_close(model.running_mean, whole.running_mean)
        torch.testing.assert_close(model.running_var, whole.running_var)
        gradient = model.weight.grad.clone()
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, whole.weight.grad, rtol=1e-4, atol=1e-5)
        model.eval()
        torch.testing.assert_close(model(part), copy.deepcopy(whole).eval()(part))

    on_threads(2, body)


# spec: U3.sync_batch_norm torch's SyncBatchNorm works inside DistributedDataParallel
def test_models_with_sync_batch_norm():
    def body(rank, size):
        inner = torch.nn.Sequential(linear(), torch.nn.SyncBatchNorm(3))
        model = DistributedDataParallel(inner)
        assert isinstance(model.module[1], SyncBatchNorm)
        for step in range(2):
            model(
                torch.full((2, 4), float(rank + step)) * torch.tensor([[1.0], [2.0]])
            ).sum().backward()
        gathered = [torch.zeros(3) for _ in range(size)]
        dist.all_gather(gathered, model.module[1].running_var)
        same(gathered[0], gathered[1])

    on_threads(2, body)
    alone = SyncBatchNorm(3)
    torch.testing.assert_close(alone(INPUTS), torch.nn.BatchNorm1d(3)(INPUTS))


def gradients_with(hook, state=None):
    """The gradient of each rank, for two ranks' inputs 1 and 3, by a hook."""
    found = [None, None]

    def body(rank, size):
        model = DistributedDataParallel(linear())
        if isinstance(hook, DDPCommHookType):
            register_ddp_comm_hook(hook, model, state)
        else:
            model.register_comm_hook(state, hook)
        model(torch.full((1, 4), 1.0 + 2 * rank)).sum().backward()
        found[rank] = model.module.weight.grad

    on_threads(2, body)
    return found


# spec: U3.quantization quantization and debugging hooks, hooks by name
@pytest.mark.parametrize(
    "hook", [each for each in DDPCommHookType if each is not DDPCommHookType.NOOP]
)
def test_hooks_average(hook):
    for each in gradients_with(hook):
        torch.testing.assert_close(each, torch.full((3, 4), 2.0), rtol=0.02, atol=0)


def test_a_hook_that_does_nothing():
    mine = gradients_with(ddp_comm_hooks.debugging_hooks.noop_hook)
    assert [each[0, 0].item() for each in mine] == [1, 3]


def test_quantized_gradients_stay_close():
    given = torch.randn(2, 3000)

    def body(rank, size):
        for hook in (
            ddp_comm_hooks.quantization_hooks.quantization_pertensor_hook,
            ddp_comm_hooks.quantization_hooks.quantization_perchannel_hook,
        ):
            model = DistributedDataParallel(torch.nn.Linear(3000, 1, bias=False))
            model.register_comm_hook(dist.group.WORLD, hook)
            model(given[rank : rank + 1]).sum().backward()
            wanted = given.mean(0, keepdim=True)
            assert (model.module.weight.grad - wanted).abs().max() < 0.05

    on_threads(2, body)


# spec: U3.post_local_sgd post-local SGD: all ranks at first, each subgroup later, with averages of
# the parameters
def test_post_local_sgd():
    weights = [None, None]

    def body(rank, size):
        model = DistributedDataParallel(linear())
        alone = dist.new_subgroups(1)[0]
        model.register_comm_hook(PostLocalSGDState(None, alone, 1), post_localSGD_hook)
        averager = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.125), averager)
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.full((1, 4), 1.0 + 2 * rank)).sum().backward()
            optimizer.step()
            seen.append(model.module.weight[0, 0].item())
        weights[rank] = seen
        state = optimizer.state_dict()
        assert state["step"] == 4 and averager.step == 4
        other = PostLocalSGDOptimizer(
            torch.optim.SGD(linear().parameters(), 1.0), averagers.PeriodicModelAverager(2)
        )
        other.load_state_dict(state)
        assert other.averager.step == 4 and other.param_groups[0]["lr"] == 0.125
        del state["step"]
        with pytest.warns(UserWarning, match="step counter"):
            other.load_state_dict(state)

    on_threads(2, body)
    # Steps of 0.125: together by 2; apart by 1 and 3, then averaged; apart; apart, then averaged.
    assert weights == [[0.25, 0.0, -0.125, -0.5], [0.25, 0.0, -0.375, -0.5]]


def test_averages_of_parameters():
    with pytest.raises(ValueError, match="period"):
        averagers.PeriodicModelAverager(0, process_group=dist.GroupMember.NON_GROUP_MEMBER)

    def body(rank, size):
        model = linear()
        with torch.no_grad():
            model.weight.fill_(rank)
        utils.average_parameters(model.parameters(), None)
        assert model.weight[0, 0].item() == 1.5
        assert utils.get_params_to_average(model.parameters()) == []
        with pytest.raises(NotImplementedError, match="str"):
            utils.get_params_to_average(["x"])
        model(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            model.weight.fill_(rank)
        averager = hierarchical_model_averager.HierarchicalModelAverager(
            OrderedDict([(2, 2), (4, 4)]), warmup_steps=1
        )
        seen = []
        for _ in range(5):
            averager.average_parameters(model.parameters())
            seen.append(model.weight[0, 0].item())
        pair = 0.5 if rank < 2 else 2.5
        assert seen == [rank, rank, pair, pair, 1.5]
        with pytest.raises(ValueError, match="last value"):
            hierarchical_model_averager.HierarchicalModelAverager(OrderedDict([(2, 3)]))

    on_threads(4, body)


# spec: U3 the optimizer's step as part of backward
def test_fused_optimizer():
    def body(rank, size):
        model = DistributedDataParallel(linear())
        model._register_fused_optim(torch.optim.SGD, 0.25, optim_params=[model.module.weight])
        model(torch.full((1, 4), 1.0 + 2 * rank)).sum().backward()
        same(model.module.weight.detach(), torch.full((3, 4), 0.0))
        same(model.module.bias.detach(), torch.zeros(3))

    on_threads(2, body)


# spec: U3 optimizers that step in backward step with averaged gradients
def test_optimizers_of_parameters():
    def body(rank, size):
        inner = linear()
        _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.125})
        model = DistributedDataParallel(inner)
        for step in range(2):
            model(torch.full((1, 4), 1.0 + 2 * rank)).sum().backward()
            same(inner.weight.detach(), torch.full((3, 4), 0.25 - 0.25 * step))

    on_threads(2, body)


# spec: U3.private DistributedDataParallel's private calls that libraries make
def test_what_libraries_call():
    def body(rank, size):
        model = DistributedDataParallel(linear())
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        model._set_static_graph()
        assert model.static_graph
        model(torch.full((1, 4), 1.0 + 2 * rank)).sum().backward()
        same(model.module.weight.grad, torch.full((3, 4), 2.0))
        with pytest.raises(ValueError, match="before the first forward"):
            DistributedDataParallel(linear()).__class__._set_static_graph(
                _run(DistributedDataParallel(linear()))
            )
        told = model._get_ddp_logging_data()
        assert told["world_size"] == 2 and told["static_graph"] == 1 and told["iteration"] == 1
        assert told["comm_hook"] == "fp16_compress_hook" and told["dtypes"] == "float32"
        assert told["num_parameter_tensors"] == 2 and told["total_parameter_size_bytes"] == 60
        assert not model.will_sync_module_buffers()
        inputs, kwargs = model.to_kwargs(
            (torch.ones(1),), {"x": torch.ones(1)}, torch.device("cpu")
        )
        assert len(inputs) == len(kwargs) == 1 and inputs[0][0].item() == 1

    on_threads(2, body)


def _run(model):
    model(torch.ones(1, 4)).sum().backward()
    return model


# spec: T4 functional collectives by torch's names
def test_functional_collectives():
    def body(rank, size):
        group, x = dist.group.WORLD, torch.tensor([[rank + 1.0, 2.0]])
        assert funcol.all_reduce(x, "sum", group).tolist() == [[3, 4]] and x[0, 0] == rank + 1
        assert funcol.all_reduce(x, "avg", [0, 1]).tolist() == [[1.5, 2]]
        assert funcol.wait_tensor(funcol.broadcast(x, 1, group)).tolist() == [[2, 2]]
        assert funcol.all_gather_tensor(x, 0, group).tolist() == [[1, 2], [2, 2]]
        assert funcol.all_gather_single(x, 1, group.group_name).tolist() == [[1, 2, 2, 2]]
        assert funcol.reduce_scatter_tensor(x, "sum", 1, group).tolist() == [[(3, 4)[rank]]]
        many = funcol.reduce_scatter_single_coalesced([x, x], "sum", [1, 1], group)
        assert [each.item() for each in many] == [(3, 4)[rank]] * 2
        assert [each.tolist() for each in funcol.all_reduce_coalesced([x], "max", group)] == [
            [[2, 2]]
        ]
        column = torch.tensor([10.0 * rank, 10.0 * rank + 1])
        assert funcol.all_to_all_single(column, None, None, group).tolist() == [rank, 10 + rank]
        assert funcol.permute_tensor(x, [1, 0], group).tolist() == [2 - rank, 2]
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("r",))
        assert funcol.all_reduce(x, dist.ReduceOp.MIN, (mesh, 0)).tolist() == [[1, 2]]
        assert funcol.all_reduce_inplace(x.clone(), "sum", mesh).tolist() == [[3, 4]]
        into = torch.zeros(2, 2)
        assert funcol.all_gather_tensor_inplace(into, x, group) is into and into[1, 0] == 2
        peers = [1 - rank, 1 - rank]
        sent, got = torch.tensor([float(rank)]), torch.zeros(1)
        funcol.batch_p2p_ops_inplace(["isend", "irecv"], peers, [0, 0], [sent, got], group)
        assert got.item() == 1 - rank
        for what, call in {
            "no reduction": lambda: funcol.all_reduce(x, "mean", group),
            "a group is": lambda: funcol.all_reduce(x, "sum", 3),
            "no group named": lambda: funcol.all_reduce(x, "sum", "nobody"),
            "cut into 2 parts": lambda: funcol.reduce_scatter_tensor(x, "sum", 0, group),
            "no Work": lambda: funcol.all_reduce_inplace(x, async_op=True),
        }.items():
            with pytest.raises(ValueError, match=what):
                call()

        y = torch.tensor([rank + 1.0, 5.0], requires_grad=True)
        (funcol.all_gather_single_autograd(y, 0, group) * torch.arange(4.0)).sum().backward()
        assert y.grad.tolist() == ([0, 2], [4, 6])[rank]
        y.grad = None
        (funcol.reduce_scatter_single_autograd(y, "avg", 0, group) * (rank + 1)).sum().backward()
        assert y.grad.tolist() == [0.5, 1]
        y.grad = None
        (funcol.all_to_all_single_autograd(y, None, None, group) * (rank + 1)).sum().backward()
        assert y.grad.tolist() == [1, 2]

    on_threads(2, body)
