# SPDX-License-Identifier: BSD-3-Clause
"""Names that other workers may use and call: `init_rpc(functions=..., allow_pickle=...)`, operators
by name, MUSTER_ALLOW_PICKLE.
"""

import os
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from ranks import LIMIT_S, meeting_file, run_ranks
from rpc_workers import on_workers

import muster as dist
from muster import autograd as rpc_autograd
from muster.nn.api import remote_module
from muster.rpc import policy

rpc = dist.rpc


# ---- what workers ask each other for
# ---------------------------------------------------------------------------------


def double(value):
    return value * 2


def not_listed(value):
    return value


class Counter:
    def __init__(self, start=0):
        self.count = start

    def up(self, by=1):
        self.count += by
        return self.count

    def _hidden(self):
        return self.count


class Plain:
    """A class that nobody lists."""


def make_plain():
    return Plain()


class Evil:
    """Runs code where it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


class CallsSystem:
    def __reduce__(self):
        return os.system, ("true",)


class CallsListed:
    """Calls a listed function where it is read, not where it is called."""

    def __reduce__(self):
        return double, (2,)


class ChangesListed:
    """Sets an attribute of a listed class where it is read."""

    def __reduce__(self):
        return Counter, (), (None, {"up": 1})


class MakesWhileRead:
    """Has one of muster's own functions call a listed one where it is read."""

    def __reduce__(self):
        from muster.nn.api import remote_module

        return remote_module._make, (double, (2,), {}, "cpu")


class Overload:
    """An attribute of an operator in an overload's place, filled like a container."""

    def __init__(self, name, items=None):
        self.name, self.items = name, items

    def __reduce__(self):
        from muster.rpc import inside

        made = inside._operator, ("aten::erfinv", self.name)
        return made if self.items is None else (*made, None, None, iter(self.items))


class LooksUp:
    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def bounded(body, *functions, allow_pickle=None):
    """`body(rank)` on two workers that let each other name `functions`."""

    def worker(rank, where):
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=where),
            functions=functions,
            allow_pickle=allow_pickle,
        )
        try:
            result = body(rank)
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
        if rpc.is_initialized():
            rpc.shutdown(timeout=LIMIT_S)
        return result

    return run_ranks(2, worker, "file://" + meeting_file())


# ---- functions


# spec: W5.calls RPC calls only what the callee allows: functions, classes, their public methods,
# torch's functions and methods
def test_listed_functions_are_called_and_others_are_not():
    def body(rank):
        other = f"worker{1 - rank}"
        assert torch.equal(rpc.rpc_sync(other, double, (torch.ones(2),)), torch.full((2,), 2.0))
        assert rpc.rpc_async(other, double, ({"a": [1]}["a"],)).wait() == [1, 1]
        assert torch.equal(
            rpc.rpc_sync(other, torch.add, (torch.ones(2), 1)), torch.full((2,), 2.0)
        )
        assert torch.equal(rpc.rpc_sync(other, torch.Tensor.neg, (torch.ones(2),)), -torch.ones(2))
        counter = rpc.remote(other, Counter, (5,))
        assert counter.rpc_sync().up(by=2) == 7 and counter.rpc_sync().up() == 8
        with pytest.raises(
            pickle.UnpicklingError,
            match="not_listed is not among what other workers may name here: give it to",
        ):
            rpc.rpc_sync(other, not_listed, (1,))
        with pytest.raises(pickle.UnpicklingError, match="mul is not among"):
            rpc.rpc_sync(other, torch.mul, (torch.ones(2), 2))
        with pytest.raises(PermissionError, match="Counter._hidden is not among"):
            counter.rpc_sync()._hidden()
        with pytest.raises(PermissionError, match="is not among what other workers may call"):
            rpc.rpc_sync(other, torch.Size, ([1],))
        for dtype in (-1, 200):
            with pytest.raises(TypeError, match="give a torch.dtype"):
                rpc.rpc_sync(other, torch.ops.aten.view, (torch.ones(2), dtype))
        loss = torch.ops.aten.soft_margin_loss
        with pytest.raises(ValueError, match="reduction is 7"):
            rpc.rpc_sync(other, loss, (torch.ones(2), torch.ones(2), 7))
        for number in (torch.tensor(7), torch.tensor([7]), True, -1):  # torch takes them for ints
            with pytest.raises(ValueError, match="reduction is"):
                rpc.rpc_sync(other, loss, (torch.ones(2), torch.ones(2), number))
        for number in (torch.tensor(6), torch.tensor([200], dtype=torch.uint8), False):
            with pytest.raises(TypeError, match="give a torch.dtype"):
                rpc.rpc_sync(other, torch.ops.aten.sum, (torch.ones(2),), {"dtype": number})
            with pytest.raises(TypeError, match="give a torch.dtype"):
                rpc.rpc_sync(other, torch.ops.aten.to.prim_dtype, (torch.ones(2), number))
        assert rpc.rpc_sync(other, torch.ops.aten.view, (torch.ones(2), [1, 2])).shape == (1, 2)
        assert rpc.rpc_sync(other, loss, (torch.ones(2), torch.ones(2), 0)).shape == (2,)
        for remainder in (torch.ops.aten.remainder, torch.ops.aten.remainder.int):
            with pytest.raises(TypeError, match="give a tensor"):
                rpc.rpc_sync(other, remainder, (2, 0))
        viewed = rpc.rpc_sync(other, torch.ops.aten.view, (torch.ones(2), torch.float64))
        assert viewed.numel() == 1
        assert rpc.rpc_sync(other, double, (3,)) == 6  # the workers go on

    bounded(body, double, Counter, torch.add, torch.Tensor.neg)


def strides_of(tensor):
    return tensor.stride()


# spec: W5 kernels of torch that read or return other memory where elements overlap get none that do
def test_tensors_that_overlap_arrive_as_dense_ones():
    def body(rank):
        other = f"worker{1 - rank}"
        lone = torch.full((3,), 1 << 62)
        overlapping = lone.as_strided((2, 3), (0, 1))
        for value in (overlapping, lone.as_strided((2, 2), (1, 1)), torch.ones(3, 4)[:, ::2]):
            assert rpc.rpc_sync(other, strides_of, (value,)) == value.contiguous().stride()
        assert rpc.rpc_sync(other, strides_of, (torch.ones(2, 3).t(),)) == (1, 3)
        for function in (torch.ops.aten.median.dim, torch.ops.aten.nanmedian.dim):
            values = rpc.rpc_sync(other, function, (overlapping, 0, False))[0]
            assert torch.equal(values, lone)
        with rpc_autograd.context() as context:
            start = torch.ones(3, requires_grad=True)
            total = rpc.rpc_sync(other, torch.sum, (start.expand(2, 3),))
            rpc_autograd.backward(context, [total])
            assert rpc_autograd.get_gradients(context)[start].tolist() == [2, 2, 2]

    bounded(body, strides_of, torch.sum)


# spec: W5 what one RPC of a process allows is nothing to the next, however the first has ended
def test_a_shutdown_that_fails_ends_what_is_allowed():
    def body(rank):
        if rank == 1:  # until the other has ended
            with pytest.raises(dist.DistBackendError):
                while True:
                    rpc.rpc_sync("worker0", double, (1,))
            return rpc.shutdown(graceful=False)
        with pytest.raises(dist.DistArgumentError, match="must not be negative"):
            rpc.shutdown(timeout=-1)
        assert rpc.is_initialized() and policy.in_force.policy is not None
        with pytest.raises(dist.DistBackendError):
            rpc.shutdown(timeout=0.1)
        assert not rpc.is_initialized() and policy.in_force.policy is None

    bounded(body, double)


class Unlisted(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def unlisted_module():
    return rpc.RRef(Unlisted())


# spec: W5 RPC calls only what the callee allows: a reference to a module that is not listed does
# not make it callable
def test_modules_that_are_not_listed_are_not_called():
    def body(rank):
        other = f"worker{1 - rank}"
        module = rpc.rpc_sync(other, unlisted_module)
        for function, arguments in (
            (remote_module._forward, ("cpu", (torch.ones(2),), {})),
            (remote_module._parameters, (True,)),
        ):
            with pytest.raises(PermissionError, match="Unlisted.forward is not among"):
                rpc.rpc_sync(other, function, (module, *arguments))

    bounded(body, unlisted_module)


# spec: W5 RPC: what a pickle calls while it is read
def test_arguments_run_no_code_where_they_are_read(tmp_path):
    def body(rank):
        other = f"worker{1 - rank}"
        mark = tmp_path / f"touched-{rank}"
        for evil in (Evil(mark), CallsSystem(), LooksUp(torch.Tensor, "mul"), Plain()):
            with pytest.raises(
                pickle.UnpicklingError, match="is not among what other workers may name here"
            ):
                rpc.rpc_sync(other, double, (evil,))
        with pytest.raises(
            pickle.UnpicklingError, match="makes no value that other workers may send here"
        ):
            rpc.rpc_sync(other, double, (CallsListed(),))
        with pytest.raises(
            pickle.UnpicklingError, match="_make.* makes no value that other workers may send here"
        ):
            rpc.rpc_sync(other, double, (MakesWhileRead(),))
        for name in ("__dict__", "_op", "__class__"):
            with pytest.raises(
                pickle.UnpicklingError, match=f"'{name}' is no overload of 'aten::erfinv'"
            ):
                rpc.rpc_sync(other, double, (Overload(name),))
        with pytest.raises(
            pickle.UnpicklingError,
            match="OpOverloadPacket is no container that a pickle of a call may fill",
        ):
            rpc.rpc_sync(other, double, (Overload("", [("_op", 1)]),))
        assert not mark.exists()
        # Values of listed classes are made anew, with their state; harmless ones need no list.
        assert (
            rpc.rpc_sync(
                other, double, ((torch.float16, torch.Size([2]), {1, 2}, torch.device("cpu")),)
            )[0]
            is torch.float16
        )

    bounded(body, double, Counter)


# spec: W5 RPC: a class that is listed cannot be changed by a pickle
def test_the_state_of_a_listed_class_is_its_values_alone():
    def body(rank):
        other = f"worker{1 - rank}"
        counter = Counter(4)
        assert rpc.rpc_sync(other, Counter.up, (counter, 3)) == 7
        assert counter.count == 4

    bounded(body, Counter, Counter.up)
    with pytest.raises(
        pickle.UnpicklingError, match="the state of type is not other workers' to set"
    ):
        from muster.rpc.policy import BoundedUnpickler, Policy

        changes_class = (
            pickle.PROTO + b"\x04" + pickle.dumps(Counter)[2:-1] + b"N}(\x8c\x02upK\x01u\x86b."
        )
        BoundedUnpickler(changes_class, Policy([Counter]), {}, {}).load()


# spec: W5 RPC: what an answer may make the caller read
def test_answers_are_bounded_as_calls_are():
    def worker(rank, where):
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=where),
            functions=None if rank == 1 else [make_plain, double],
        )
        if rank == 0:
            with pytest.raises(
                pickle.UnpicklingError, match="Plain is not among what other workers may name here"
            ):
                rpc.rpc_sync("worker1", make_plain)
            assert rpc.rpc_sync("worker1", double, (2,)) == 4
        rpc.shutdown(timeout=LIMIT_S)

    run_ranks(2, worker, "file://" + meeting_file())


# spec: W5 RPC: a number is looked at in the places that torch takes it for: one that is given by
# place is no keyword-only argument of another overload
def test_numbers_by_place_are_no_keyword_only_arguments():
    from muster.rpc import inside

    aten, x = torch.ops.aten, torch.ones(3, 4)
    for operator, arguments in (
        (aten.sum, (x, 0)),
        (aten.mean, (x, 1)),
        (aten.prod, (x, 0)),
        (aten.mean, (x, [1], True)),
        (aten.arange, (0, 5, 1)),
        (aten.eye, (3, 4)),
        (aten.full_like, (x, 4)),
        (aten.bartlett_window, (5, True)),
    ):
        operator(*arguments)
        inside._check_operator(operator, arguments, {})
    for operator, arguments, named in (
        (aten.sum, (x, 0), {"dtype": 7}),
        (aten.arange, (0, 5, 1), {"dtype": 7}),
        (aten.view, (x, 7), {}),
        (aten.to.prim_dtype, (x, 7), {}),
    ):
        with pytest.raises(TypeError, match=r"give a torch\.dtype"):
            inside._check_operator(operator, arguments, named)


# spec: W5 RPC: an answer imports no module
def test_an_exception_of_another_worker_imports_nothing():
    from muster.rpc import inside

    assert "this" not in sys.modules
    assert inside._class_of("this.Anything") is None and "this" not in sys.modules
    assert inside._class_of("pickle.UnpicklingError") is pickle.UnpicklingError


# spec: W5 RPC: what muster's own modules call for a caller is checked as its calls are
def test_modules_and_optimizers_are_made_of_what_may_be_called():
    from muster.nn.api import remote_module
    from muster.optim import distributed_optimizer

    def body(rank):
        other = f"worker{1 - rank}"
        total = torch.ops.aten.sum
        with pytest.raises(TypeError, match="aten.sum: dtype is 7; give a torch.dtype"):
            rpc.rpc_sync(other, remote_module._make, (total, (torch.ones(2),), {"dtype": 7}, "cpu"))
        with pytest.raises(TypeError, match="aten.add: give a tensor"):
            rpc.rpc_sync(other, remote_module._make, (torch.ops.aten.add, (1, 2), {}, "cpu"))
        with pytest.raises(TypeError, match="aten.mul: give a tensor"):
            rpc.rpc_sync(other, distributed_optimizer._make, (torch.ops.aten.mul, [], (9,), {}))
        with pytest.raises(PermissionError, match="_make is not among what other workers may call"):
            rpc.rpc_sync(
                other,
                remote_module._make,
                (remote_module._make, (torch.Size, ([1],), {}, "cpu"), {}, "cpu"),
            )

    bounded(body, allow_pickle=False)


# spec: W5 RPC: no function at all, and contradictions
def test_without_pickles_operators_and_nothing_else():
    def body(rank):
        other = f"worker{1 - rank}"
        assert torch.equal(
            rpc.rpc_sync(other, "aten::add", (torch.ones(2), 1)), torch.full((2,), 2.0)
        )
        assert torch.equal(
            rpc.rpc_sync(other, torch.ops.aten.mul, (torch.ones(2), 3)), torch.full((2,), 3.0)
        )
        with pytest.raises(pickle.UnpicklingError, match="double is not among"):
            rpc.rpc_sync(other, double, (1,))
        with pytest.raises(pickle.UnpicklingError, match="not among the operators"):
            rpc.rpc_sync(other, torch.ops.aten.from_file, ("/etc/hostname",))

    bounded(body, allow_pickle=False)
    with pytest.raises(dist.DistArgumentError, match="give one of them"):
        rpc.init_rpc("a", rank=0, world_size=1, functions=[double], allow_pickle=True)
    with pytest.raises(dist.DistArgumentError, match="which other workers cannot name"):
        rpc.init_rpc("a", rank=0, world_size=1, functions=[lambda: 0])
    assert not rpc.is_initialized()


# spec: W5 RPC: modules and optimizers on other workers, of listed classes
def test_remote_modules_and_optimizers_of_listed_classes():
    def body(rank):
        if rank == 1:
            return
        module = dist.nn.RemoteModule("worker1", torch.nn.Linear, (2, 1))
        assert module.forward(torch.ones(3, 2)).shape == (3, 1)
        remote = module.get_module_rref()
        remote.rpc_sync().train(False)  # inherited, and listed
        for inherited in ("compile", "register_module", "apply", "load_state_dict"):
            with pytest.raises(PermissionError, match=f"Linear.{inherited} is not among"):
                getattr(remote.rpc_sync(), inherited)()
        with pytest.raises(pickle.UnpicklingError, match="Bilinear is not among"):
            dist.nn.RemoteModule("worker1", torch.nn.Bilinear, (2, 2, 1))
        optimizer = dist.optim.DistributedOptimizer(
            torch.optim.SGD, module.remote_parameters(), lr=0.5
        )
        before = module.remote_parameters()[1].to_here().clone()
        with dist.autograd.context() as context:
            dist.autograd.backward(context, [module.forward(torch.ones(1, 2)).sum()])
            optimizer.step(context)
        assert torch.allclose(module.remote_parameters()[1].to_here(), before - 0.5)

    bounded(body, torch.nn.Linear, torch.nn.Linear.train, torch.optim.SGD)


# ---- operators by name
# -----------------------------------------------------------------------------------------------


# spec: W5 RPC: operators that do more than compute are allowed one by one
def test_operators_that_touch_more_than_tensors_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\1" * 64)

    def body(rank):
        other = f"worker{1 - rank}"
        for name, arguments in (
            ("aten::from_file", (str(path), True, 64)),
            ("aten::empty", ([4],)),
            ("aten::set_", (torch.ones(1),)),
            ("aten::resize_", (torch.ones(1), [1000])),
            ("aten::as_strided", (torch.ones(1), [1], [1])),
            ("prims::add", (torch.ones(1), torch.ones(1))),
        ):
            with pytest.raises(
                RuntimeError,
                match=f"'{name}' is not among the operators that other workers may call by name",
            ):
                rpc.rpc_sync(other, name, arguments)
        rpc.rpc_sync(other, "aten::add_", (torch.ones(1), 1))
        if rank == 0:
            rpc.rpc_sync(other, rpc.allow_operator, ("aten::from_file",))
            assert rpc.rpc_sync(other, "aten::from_file", (str(path), True, 4)).numel() == 4
        with pytest.raises(
            dist.DistArgumentError, match="torch has no operator 'aten::nothing_of_that_name'"
        ):
            rpc.allow_operator("aten::nothing_of_that_name")

    on_workers(2, body)


# ---- for the whole job
# -----------------------------------------------------------------------------------------------

PROGRAM = """
import pickle, sys, torch, muster as dist
dist.init_process_group(rank=0, world_size=1, init_method="file://" + sys.argv[1])
class Own: pass
out = [None]
dist.all_gather_object(out, {"a": torch.ones(2), "b": [1, "x"]})
assert torch.equal(out[0]["a"], torch.ones(2)) and out[0]["b"] == [1, "x"]
try:
    dist.all_gather_object(out, Own())
except pickle.UnpicklingError as error:
    print("refused", error)
dist.destroy_process_group()
try:
    dist.rpc.init_rpc("a", rank=0, world_size=1, allow_pickle=True)
except dist.DistArgumentError as error:
    print("contradiction", error)
options = dist.rpc.RpcBackendOptions(init_method="file://" + sys.argv[1])
dist.rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)
try:
    dist.rpc.rpc_sync("a", len, ([1],))
except pickle.UnpicklingError as error:
    print("bounded", error)
dist.rpc.shutdown()
"""


# spec: W5.pickles pickles can be refused for the whole job
def test_pickles_refused_for_the_whole_job(tmp_path):
    environment = dict(os.environ, MUSTER_ALLOW_PICKLE="0")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, meeting_file()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    refused, contradiction, bounded = (
        ended.stdout.find(word) for word in ("refused", "contradiction", "bounded")
    )
    assert 0 <= refused < contradiction < bounded, ended.stdout
    assert (
        "MUSTER_ALLOW_PICKLE" in ended.stdout[contradiction:bounded]
        and "init_rpc(functions=[...])" in ended.stdout[bounded:]
    )
