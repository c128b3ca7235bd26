# SPDX-License-Identifier: BSD-3-Clause
"""`muster.autograd`, `muster.optim.DistributedOptimizer`, `muster.nn.RemoteModule`, and the
documents' programs that use them.
"""

import threading

import pytest
import torch
from rpc_workers import on_workers, raised
from torch import nn

import muster as dist

rpc, autograd = dist.rpc, dist.autograd


def alike(*parts):
    """The same weights from all."""
    generator = torch.Generator().manual_seed(sum(map(ord, "".join(map(str, parts)))))
    return lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5


def filled(module, name):
    """The module in float64, with weights that depend on its name alone."""
    module, weights = module.double(), alike(name)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(weights(*each.shape))
    return module


def close(actual, expected):
    assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max(), (
        f"{actual}\nis not\n{expected}"
    )


# ---- gradients across workers
# ----------------------------------------------------------------------------------------

weights = {}


def product(x):
    if "here" not in weights:
        weights["here"] = alike("product")(3, 3).requires_grad_(True)
    return x @ weights["here"]


def gradient_here(context_id):
    return autograd.get_gradients(context_id)[weights["here"]]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("this one has no gradient")


def failing(x):
    return Failing.apply(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def square(x):
    return Square.apply(x)


# spec: O1 in Python
def test_gradients():
    def gradients(x, weight):
        x, weight = x.detach().requires_grad_(True), weight.detach().requires_grad_(True)
        ((x @ weight).square() @ weight).sum().backward()
        return x.grad, weight.grad

    def body(rank):
        if rank != 0:
            return
        expected = gradients(alike("x")(2, 3), alike("product")(3, 3))
        for mode in ("fast", "smart"):
            x = nn.Parameter(alike("x")(2, 3))
            with autograd.context() as context_id:
                found = rpc.rpc_sync(
                    1,
                    product,
                    (rpc.rpc_async(1, square, (rpc.rpc_sync(1, product, (x,)),)).wait(),),
                )
                if mode == "smart":
                    rpc.rpc_sync(1, product, (x * 2,))  # nobody uses it
                autograd.backward(context_id, [found.sum()], mode=mode)
                close(autograd.get_gradients(context_id)[x], expected[0])
                close(rpc.rpc_sync(1, gradient_here, (context_id,)), expected[1])
                assert x.grad is None
            assert "no context" in str(raised(dist.DistError, autograd.get_gradients, context_id))
        assert "no context 99" in str(raised(dist.DistError, autograd.backward, 99, [x.sum()]))
        with autograd.context() as context_id:
            assert "scalar" in str(
                raised(
                    dist.DistError, autograd.backward, context_id, [rpc.rpc_sync(1, product, (x,))]
                )
            )
            assert "mode" in str(
                raised(
                    dist.DistError, lambda: autograd.backward(context_id, [x.sum()], mode="other")
                )
            )
            raised(dist.DistError, autograd.context().__enter__)
        with autograd.context() as context_id:
            error = raised(
                Exception, autograd.backward, context_id, [rpc.rpc_sync(1, failing, (x,)).sum()]
            )
            assert "this one has no gradient" in str(error) and "worker1" in str(error)
        with autograd.context() as context_id:
            lost = failing(rpc.rpc_sync(1, product, (x,))).sum()
            assert "this one has no gradient" in str(
                raised(ValueError, autograd.backward, context_id, [lost])
            )
        # Through references; the pass begins where the root is. Those of one context add up.
        with autograd.context() as context_id:
            root = rpc.remote(1, torch.sum, (rpc.rpc_sync(1, square, (x,)),))
            root.backward(context_id)
            close(autograd.get_gradients(context_id)[x], 2 * x)
            twice = (
                rpc.remote(1, square, (x,)).to_here()
                * rpc.remote("worker0", square, (x,)).to_here()
            ).sum()
            autograd.backward(context_id, [twice], mode="smart")
            close(autograd.get_gradients(context_id)[x], 2 * x + 4 * x**3)
            # Other passes of other contexts, at the same time on other threads.
            found = []

            def other(times):
                y = torch.full((2,), float(times), dtype=torch.float64, requires_grad=True)
                for _ in range(5):
                    with autograd.context() as mine:
                        autograd.backward(mine, [rpc.rpc_sync(1, square, (y,)).sum()])
                        found.append(
                            (autograd.get_gradients(mine)[y] - 2 * times).abs().max().item()
                        )

            threads = [threading.Thread(target=other, args=(times,)) for times in range(3)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert found == [0.0] * 15
            close(autograd.get_gradients(context_id)[x], 2 * x + 4 * x**3)

    on_workers(2, body)


# ---- optimizers


class Line:
    def __init__(self, name):
        self.weight = nn.Parameter(alike(name)(3, 1))
        self.bias = nn.Parameter(alike(name, "bias")(1))

    def forward(self, x):
        return x @ self.weight + self.bias

    def parameters(self):
        return [rpc.RRef(self.weight), rpc.RRef(self.bias)]

    def values(self):
        return self.weight.detach(), self.bias.detach(), self.weight.grad


def locally(make, steps):
    lines = [Line("first"), Line("second")]
    optimizer = make([each for line in lines for each in (line.weight, line.bias)])
    for step in range(steps):
        optimizer.zero_grad()
        x = alike("input", step)(4, 3)
        (lines[0].forward(x) * lines[1].forward(x)).square().sum().backward()
        optimizer.step()
    return lines


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.05}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.RMSprop, {"lr": 0.01}),
]


def train(lines, context_id):
    """By another trainer: `lines` are references."""
    x = torch.ones(2, 3, dtype=torch.float64)
    loss = sum(each.rpc_sync().forward(x).sum() for each in lines)
    autograd.backward(context_id, [loss])


def step_often(lines, times):
    optimizer = dist.optim.DistributedOptimizer(
        torch.optim.SGD, [p for each in lines for p in each.rpc_sync().parameters()], lr=0.5
    )
    for _ in range(times):
        with autograd.context() as context_id:
            train(lines, context_id)
            optimizer.step(context_id)


# spec: O2 in Python
def test_optimizers():
    def body(rank):
        if rank != 0:
            return
        for kind, options in OPTIMIZERS:
            lines = [
                rpc.remote("worker1", Line, ("first",)),
                rpc.remote("worker2", Line, ("second",)),
            ]
            parameters = [each for line in lines for each in line.rpc_sync().parameters()]
            optimizer = dist.optim.DistributedOptimizer(kind, parameters, **options)
            for step in range(3):
                with autograd.context() as context_id:
                    x = alike("input", step)(4, 3)
                    loss = (
                        (lines[0].rpc_sync().forward(x) * lines[1].rpc_sync().forward(x))
                        .square()
                        .sum()
                    )
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
            for mine, theirs in zip(lines, locally(lambda all: kind(all, **options), 3)):
                weight, bias, gradient = mine.rpc_sync().values()
                close(weight, theirs.weight)
                close(bias, theirs.bias)
                assert gradient is None
        # Two trainers at once: no gradient is lost or counted twice. Each of 16 steps takes half of
        # a gradient of 2.
        lines = [rpc.remote("worker1", Line, ("first",)), rpc.remote("worker2", Line, ("second",))]
        before = [each.rpc_sync().values() for each in lines]
        others = [rpc.rpc_async(to, step_often, (lines, 8)) for to in ("worker1", "worker2")]
        torch.futures.wait_all(others)
        for (weight, bias, _), each in zip(before, lines):
            after = each.rpc_sync().values()
            assert torch.allclose(after[0], weight - 16, atol=1e-12) and torch.allclose(
                after[1], bias - 16, atol=1e-12
            )

        make = dist.optim.DistributedOptimizer
        assert "LBFGS" in str(raised(ValueError, make, torch.optim.LBFGS, parameters))
        assert "needs parameters" in str(raised(ValueError, make, torch.optim.SGD, []))
        assert "learning rate" in str(
            raised(ValueError, lambda: make(torch.optim.SGD, parameters, lr=-1.0))
        )
        assert "leaf" in str(
            raised(ValueError, make, torch.optim.SGD, [rpc.remote(1, torch.ones, (2,))])
        )
        assert "no context" in str(
            raised(dist.DistError, make(torch.optim.SGD, parameters, lr=0.1).step, 7)
        )

    on_workers(3, body)


# ---- modules


class Wide(nn.Module):
    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        filled(self.add("inner", nn.Linear(inputs, outputs, bias=bias)), "wide")

    def add(self, name, module):
        self.add_module(name, module)
        return module

    def forward(self, x, scale=1):
        return self.inner(x) * scale


def through(module, x):
    return module(x)


# spec: N9 in Python, N11 RemoteModule(remote_device, module_cls, args, kwargs), "trainer0" means
# its cpu
def test_remote_modules():
    assert "init_rpc" in str(
        raised(dist.DistArgumentError, dist.nn.RemoteModule, "worker1", nn.Linear, (1, 1))
    )

    def body(rank):
        if rank != 0:
            return
        x, here = alike("x")(4, 3), Wide(3, 2, bias=False)
        here(x).sum().backward()
        module = dist.nn.RemoteModule("worker1/cpu", Wide, (3, 2), {"bias": False})
        assert torch.equal(module(x), here(x)) and torch.equal(
            module.forward(x, scale=2), here(x, 2)
        )
        assert torch.equal(module.forward_async(x).wait(), here(x))
        parameters = module.remote_parameters()
        assert (
            len(parameters) == 1
            and parameters[0].owner_name() == "worker1"
            and module.remote_parameters(recurse=False) == []
        )
        assert module.get_module_rref().rpc_sync().forward(x).shape == (4, 2)
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(x).sum()])
            gradients = rpc.rpc_sync(1, _gradient_of, (parameters[0], context_id))
            close(gradients, here.inner.weight.grad)
            dist.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5).step(context_id)
        close(parameters[0].to_here(), here.inner.weight - 0.5 * here.inner.weight.grad)
        moved = rpc.rpc_sync(2, through, (module, x))
        assert torch.equal(moved, module(x))
        again = dist.nn.RemoteModule.init_from_module_rref("worker1", module.get_module_rref())
        assert torch.equal(again(x), moved) and "worker1" in repr(again)
        assert "has no parameters" in str(raised(ValueError, module.parameters))
        assert "no remote device" in str(
            raised(ValueError, dist.nn.RemoteModule, "worker1/", nn.Linear, (1, 1))
        )
        assert "no torch.nn.Module" in str(raised(ValueError, dist.nn.RemoteModule, "worker1", int))
        assert dist.nn.RemoteModule is dist.nn.api.RemoteModule

    on_workers(3, body)


def _gradient_of(parameter, context_id):
    return autograd.get_gradients(context_id)[parameter.local_value()]


# ---- the documents' programs
# -----------------------------------------------------------------------------------------


# spec: P1 RPC: rpc_sync, remote and distributed autograd of the documents
def test_documents_first_steps():
    def body(rank):
        if rank != 0:
            return
        ret = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
        assert torch.equal(ret, torch.tensor([4.0, 4.0]))
        fut1 = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 3))
        fut2 = rpc.rpc_async("worker1", min, args=(1, 2))
        assert torch.equal(fut1.wait() + fut2.wait(), torch.tensor([5.0, 5.0]))
        rref1 = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
        rref2 = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        assert torch.equal(rref1.to_here() + rref2.to_here(), torch.tensor([6.0, 6.0]))
        with autograd.context() as context_id:
            t1 = torch.rand((3, 3), requires_grad=True)
            t2 = torch.rand((3, 3), requires_grad=True)
            loss = rpc.rpc_sync("worker1", torch.add, args=(t1, t2)).sum()
            autograd.backward(context_id, [loss])
            gradients = autograd.get_gradients(context_id)
            assert torch.equal(gradients[t1], torch.ones(3, 3)) and torch.equal(
                gradients[t2], torch.ones(3, 3)
            )

    on_workers(2, body)


class BatchServer:
    """Hands out the weights of the next step when all trainers have handed in their gradients."""

    def __init__(self, trainers):
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.lock, self.future, self.trainers, self.came = (
            threading.Lock(),
            torch.futures.Future(),
            trainers,
            0,
        )
        self.optimizer = torch.optim.SGD([self.weight], lr=0.25)
        self.weight.grad = torch.zeros_like(self.weight)

    def get(self):
        return self.weight.detach()

    @staticmethod
    @rpc.functions.async_execution
    def update(server, gradient):
        self = server.local_value()
        with self.lock:
            self.weight.grad += gradient / self.trainers
            self.came += 1
            future = self.future
            if self.came == self.trainers:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.came, self.future = 0, torch.futures.Future()
                future.set_result(self.weight.detach().clone())
        return future


def train_with(server, number, steps):
    weight = server.rpc_sync().get().requires_grad_(True)
    for step in range(steps):
        (alike("batch", number, step)(5, 3) @ weight - 1).square().mean().backward()
        weight = rpc.rpc_sync(
            server.owner(), BatchServer.update, (server, weight.grad)
        ).requires_grad_(True)
    return weight.detach()


# spec: P1 RPC: the parameter server that updates in batches
def test_documents_parameter_server():
    def body(rank):
        if rank != 0:
            return
        server = rpc.RRef(BatchServer(3))
        found = torch.futures.wait_all(
            [rpc.rpc_async(f"trainer{i}", train_with, (server, i, 5)) for i in (1, 2, 3)]
        )
        weight = torch.zeros(3, dtype=torch.float64)
        for step in range(5):
            leaf = weight.clone().requires_grad_(True)
            (
                sum((alike("batch", i, step)(5, 3) @ leaf - 1).square().mean() for i in (1, 2, 3))
                / 3
            ).backward()
            weight -= 0.25 * leaf.grad
        for each in found:
            close(each, weight)

    on_workers(["ps", "trainer1", "trainer2", "trainer3"], body)


class Recurrent(nn.Module):
    """A recurrent model whose embedding and decoder live on a parameter server."""

    def __init__(self, ps, words, size):
        super().__init__()
        self.embedding = rpc.remote(ps, _embedding, (words, size))
        self.rnn = filled(nn.LSTM(size, size), "rnn")
        self.decoder = rpc.remote(ps, _decoder, (words, size))

    def forward(self, words, hidden):
        found, hidden = self.rnn(self.embedding.rpc_sync().forward(words), hidden)
        return self.decoder.rpc_sync().forward(found), hidden

    def parameter_rrefs(self):
        remote = [
            each
            for ref in (self.embedding, self.decoder)
            for each in rpc.rpc_sync(ref.owner(), _parameters_of, (ref,))
        ]
        return remote + [rpc.RRef(each) for each in self.rnn.parameters()]


def _embedding(words, size):
    return filled(nn.Embedding(words, size), "embedding")


def _decoder(words, size):
    return filled(nn.Linear(size, words), "decoder")


def _parameters_of(module):
    return [rpc.RRef(each) for each in module.local_value().parameters()]


# spec: P1 RPC: the recurrent model with a remote embedding, against one process
@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_documents_recurrent_model(mode):
    size, count, length, batch = 8, 11, 5, 3

    def losses(rnn_of, hidden, step):
        words = torch.arange(length * batch).view(length, batch).mul(7 + step) % count
        out, hidden = rnn_of(words, hidden)
        return nn.functional.cross_entropy(
            out.view(-1, count), (words.flatten() * 3 + 1) % count
        ), tuple(each.detach() for each in hidden)

    def start():
        return tuple(torch.zeros(1, batch, size, dtype=torch.float64) for _ in range(2))

    def body(rank):
        if rank != 0:
            return
        model = Recurrent("ps", count, size)
        optimizer = dist.optim.DistributedOptimizer(
            torch.optim.SGD, model.parameter_rrefs(), lr=0.1
        )
        hidden = start()
        for step in range(3):
            with autograd.context() as context_id:
                loss, hidden = losses(model, hidden, step)
                autograd.backward(context_id, [loss], mode=mode)
                optimizer.step(context_id)
        embedding, rnn, decoder = (
            _embedding(count, size),
            filled(nn.LSTM(size, size), "rnn"),
            _decoder(count, size),
        )
        alone = [*embedding.parameters(), *decoder.parameters(), *rnn.parameters()]
        optimizer, hidden = torch.optim.SGD(alone, lr=0.1), start()

        def one(words, hidden):
            out, hidden = rnn(embedding(words), hidden)
            return decoder(out), hidden

        for step in range(3):
            optimizer.zero_grad()
            loss, hidden = losses(one, hidden, step)
            loss.backward()
            optimizer.step()
        for mine, expected in zip(model.parameter_rrefs(), alone):
            close(mine.to_here(), expected)

    on_workers(["trainer", "ps"], body)


class Shard:
    """A part of a model that takes references to its inputs, so that they go straight from shard to
    shard.
    """

    def __init__(self, name, *sizes):
        self.module = filled(nn.Sequential(nn.Linear(*sizes), nn.ReLU()), name)

    def forward(self, x):
        return self.module(x.to_here())

    def parameters(self):
        return [rpc.RRef(each) for each in self.module.parameters()]


# spec: P1 RPC: the pipeline of two shards with micro-batches
def test_documents_pipeline():
    def body(rank):
        if rank != 0:
            return
        first, second = (
            rpc.remote("worker1", Shard, ("first", 4, 6)),
            rpc.remote("worker2", Shard, ("second", 6, 2)),
        )
        optimizer = dist.optim.DistributedOptimizer(
            torch.optim.SGD,
            [*first.rpc_sync().parameters(), *second.rpc_sync().parameters()],
            lr=0.5,
        )
        alone = [Shard("first", 4, 6).module, Shard("second", 6, 2).module]
        here = torch.optim.SGD([each for part in alone for each in part.parameters()], lr=0.5)
        for step in range(2):
            x = alike("pipeline", step)(8, 4)
            with autograd.context() as context_id:
                parts = [
                    second.rpc_async().forward(first.remote().forward(rpc.RRef(each)))
                    for each in x.split(2)
                ]
                out = torch.cat(torch.futures.wait_all(parts))
                autograd.backward(context_id, [(out - 1).square().mean()])
                optimizer.step(context_id)
            here.zero_grad()
            (alone[1](alone[0](x)) - 1).square().mean().backward()
            here.step()
        for shard, part in zip((first, second), alone):
            for mine, expected in zip(shard.rpc_sync().parameters(), part.parameters()):
                close(mine.to_here(), expected)

    on_workers(3, body)
