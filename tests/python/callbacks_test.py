"""Code of users' that runs when a call is done: it may wait, sleep, never return; in stock torch on backend muster and in muster's own face."""

import concurrent.futures
import datetime
import faulthandler
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed
from ranks import LIMIT_S, meeting_file, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

import muster
import muster.torch
from muster.algorithms.ddp_comm_hooks import powerSGD_hook as own_powerSGD_hook
from muster.nn.parallel import DistributedDataParallel

FACES = ["torch", "muster"]
WAIT = datetime.timedelta(seconds=60)


class Face:
    """The functions of one face, and its DDP."""

    def __init__(self, name, rank, size, meeting):
        self.is_own = name == "muster"
        self.dist = muster if self.is_own else torch.distributed
        store = self.dist.FileStore(meeting, size)
        self.dist.init_process_group(
            None if self.is_own else "muster", store=store, rank=rank, world_size=size, timeout=WAIT
        )

    def train(self, net, hook=None, state=None, steps=10, **options):
        """The losses and the weights, after training a copy on data of this rank's own."""
        net = (
            DistributedDataParallel(net, **options)
            if self.is_own
            else torch.nn.parallel.DistributedDataParallel(net, **options)
        )
        if hook is not None:
            net.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        losses = []
        generator = torch.Generator().manual_seed(self.dist.get_rank())
        for _ in range(steps):
            x = torch.randn(16, 24, generator=generator)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), x[:, :8].tanh())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, torch.nn.utils.parameters_to_vector(net.parameters()).tolist()

    def sum_later(self, value, group=None):
        """The future of an all_reduce."""
        return self.dist.all_reduce(value, group=group, async_op=True).get_future()


def model(layers=4):
    torch.manual_seed(1)
    widths = [24] * layers + [8]
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])))


def on_ranks(size, face, body, *arguments):
    meeting = meeting_file()

    def rank_body(rank):
        faulthandler.dump_traceback_later(LIMIT_S / 4, exit=True)
        known = Face(face, rank, size, meeting)
        result = body(known, rank, size, *arguments)
        known.dist.destroy_process_group()
        return result

    return run_ranks(size, rank_body)


# ---- outside of backward


def nested(face, value, groups, depth):
    """A future whose callback waits for another one of its kind, `depth` deep."""

    def deeper(future):
        summed = future.value()[0]
        return (
            summed
            if depth == 1
            else nested(
                face, summed / face.dist.get_world_size(), groups[1:] + groups[:1], depth - 1
            ).wait()
        )

    return face.sum_later(value.clone(), groups[0]).then(deeper)


def nested_waits(face, rank, size):
    groups = [face.dist.new_group(list(range(size))) for _ in range(2)]
    for some in ([None], groups[:1], groups):
        for depth in (2, 3, 5):
            for i in range(4):
                future = nested(face, torch.full((50,), float(i)), some, depth)
                assert torch.equal(future.wait(), torch.full((50,), float(i * size))), (depth, i)


# spec: E3 get_future: a callback may wait for calls whose callbacks wait, on one and on two groups
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("face", FACES)
def test_callbacks_wait_for_other_calls(face, size):
    on_ranks(size, face, nested_waits)


def waits_for_what_came_later(face, rank, size):
    first, second = (torch.ones(5) for _ in range(2))
    later = []
    known = threading.Event()

    def wait_for_later(future):
        known.wait()
        return future.value()[0] + later[0].wait()[0] + later[1].wait()

    future = face.sum_later(first)
    with (
        concurrent.futures.ThreadPoolExecutor() as pool
    ):  # where the call is done already `then` runs the callback itself
        both = pool.submit(lambda: future.then(wait_for_later).wait())
        later.append(face.sum_later(second))
        later.append(later[0].then(lambda future: future.value()[0] * 10))
        known.set()
        assert torch.equal(both.result(), torch.full((5,), 12.0 * size))


# spec: E3 get_future: a callback may wait for the future, and for the callbacks, of a call that was started after its own
@pytest.mark.parametrize("face", FACES)
def test_callbacks_wait_for_later_calls(face):
    on_ranks(2, face, waits_for_what_came_later)


class Polls(torch.autograd.Function):
    """Backward asks for a future until it is done."""

    @staticmethod
    def forward(ctx, x, start, pause):
        ctx.start, ctx.pause = start, pause
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        future = ctx.start(gradient.clone())
        while not future.done():
            time.sleep(ctx.pause)
        return future.value()[0], None, None


def polls_in_backward(face, rank, size, pause):
    x = torch.full((4,), float(rank + 1), requires_grad=True)
    (
        Polls.apply(Polls.apply(x, face.sum_later, pause), face.sum_later, pause) * (rank + 1)
    ).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0 * size)), x.grad


# spec: E3 get_future: backward may poll for a future between sleeps, short ones too
@pytest.mark.parametrize("pause", [0.001, 0.02])
@pytest.mark.parametrize("face", FACES)
def test_backward_polls_for_a_future(face, pause):
    on_ranks(2, face, polls_in_backward, pause)


def polls_for_what_came_later(face, rank, size):
    later = threading.Event()

    def poll(_):
        while not later.wait(0.02):
            pass
        return "came"

    first = face.sum_later(torch.ones(5))
    with (
        concurrent.futures.ThreadPoolExecutor() as pool
    ):  # where the call is done already `then` runs the callback itself
        polled = pool.submit(lambda: first.then(poll).wait())
        face.sum_later(torch.ones(5)).then(lambda _: later.set())
        assert polled.result() == "came"


# spec: E3 get_future: a callback may poll, between short sleeps, for what a later one does
@pytest.mark.parametrize("face", FACES)
def test_callbacks_poll_for_later_ones(face):
    on_ranks(2, face, polls_for_what_came_later)


def keeps_order(face, rank, size):
    seen = []
    future = face.sum_later(torch.ones(5))
    for i in range(10):
        future.add_done_callback(lambda done, i=i: seen.append(i))
    future.then(lambda done: None).wait()
    assert seen == list(range(10))


# spec: E3 get_future: callbacks of one future run in the order in which they were given
@pytest.mark.parametrize("face", FACES)
def test_callbacks_keep_their_order(face):
    on_ranks(3, face, keeps_order)


# ---- in backward


def hook_that_waits(face, size, depth, where):
    def average(value):
        return value / size

    def second(future, left):
        value = average(future.value()[0])
        if left == 0:
            return value
        return face.sum_later(value).then(lambda done: second(done, left - 1)).wait()

    def hook(state, bucket):
        future = face.sum_later(bucket.buffer())
        if where == "at once":  # on the thread in backward
            future.wait()
        chained = future.then(lambda done: second(done, depth))
        if where == "at once":
            chained.wait()
        return chained

    return hook


def trains_with_waits(face, rank, size, depth, where, options):
    _, plain = face.train(model(), steps=20, **options)
    _, hooked = face.train(model(), hook_that_waits(face, size, depth, where), steps=20, **options)
    torch.testing.assert_close(torch.tensor(hooked), torch.tensor(plain), rtol=1e-4, atol=1e-5)


# spec: K4 communication hooks: a hook's callbacks may wait for other calls, with one bucket and with many
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.002}], ids=["one bucket", "many"])
@pytest.mark.parametrize("depth, where", [(1, "later"), (2, "later"), (3, "later"), (1, "at once")])
@pytest.mark.parametrize("face", FACES)
def test_hooks_wait_in_callbacks(face, depth, where, options):
    on_ranks(2, face, trains_with_waits, depth, where, options)


def asks_the_model(face, rank, size):
    net = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    seen = []

    def hook(state, bucket):
        seen.append(len(net.bucket_bytes()))

        def average(future):
            seen.append(len(net.bucket_bytes()))
            return future.value()[0] / size

        return face.sum_later(bucket.buffer()).then(average)

    net.register_comm_hook(None, hook)
    for _ in range(3):
        net(torch.randn(2, 24)).sum().backward()
    assert len(seen) > 6 and seen[-1] > 1


# spec: K4 communication hooks: a hook and its callbacks may ask the model
def test_hooks_ask_the_model():
    on_ranks(2, "muster", asks_the_model)


class Calls(torch.autograd.Function):
    """Backward starts a call whose callback starts another one; `seen` gets what was begun, in order."""

    @staticmethod
    def forward(ctx, x, face, name, seen, before):
        ctx.face, ctx.name, ctx.seen, ctx.before = face, name, seen, before
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        face, name, seen = ctx.face, ctx.name, ctx.seen
        ctx.before()
        seen.append(name)

        def callback(done):
            seen.append("after " + name)
            return face.sum_later(done.value()[0]).wait()[0]

        seen.append(face.sum_later(torch.ones(3)).then(callback))
        return gradient, None, None, None, None


def calls_in_a_pass_within_another(face, rank, size):
    seen = []

    def names():
        return [each for each in seen if isinstance(each, str)]

    def calls(x, name, before=lambda: None):
        return Calls.apply(x, face, name, seen, before)

    def inner_calls_are_over():
        face.dist.all_reduce(torch.ones(1))  # later than those calls, and so are they
        assert not threading.Event().wait(0.1) and names() == ["outer", "inner"]

    x = torch.ones(3, requires_grad=True)
    first = calls(x, "last", inner_calls_are_over)
    inside = torch.utils.checkpoint.checkpoint(
        lambda y: calls(y, "inner"), first, use_reentrant=True
    )
    calls(inside, "outer").sum().backward()
    for each in seen:
        if not isinstance(each, str):
            assert torch.equal(each.wait(), torch.full((3,), float(size * size)))
    assert names() == ["outer", "inner", "last", "after outer", "after inner", "after last"]


# spec: E3 K4 callbacks of a backward pass inside another run after the outer one's calls, in the order of the calls
@pytest.mark.parametrize("face", FACES)
def test_callbacks_of_a_pass_within_another(face):
    on_ranks(2, face, calls_in_a_pass_within_another)


HOOKS = {
    "powerSGD": (
        lambda dist: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
    "quantization_pertensor": (lambda dist: None, quantization_hooks.quantization_pertensor_hook),
    "quantization_perchannel": (lambda dist: None, quantization_hooks.quantization_perchannel_hook),
    "post_localSGD": (
        lambda dist: post_localSGD_hook.PostLocalSGDState(
            None, dist.new_group(list(range(dist.get_world_size()))), 10
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
}


def trains_by_torchs_hook(face, rank, size, name, options):
    if face.is_own:  # the hook itself communicates by stock torch, beside muster's own groups
        meeting = torch.distributed.FileStore(options.pop("meeting"), size)
        torch.distributed.init_process_group(
            "muster", store=meeting, rank=rank, world_size=size, timeout=WAIT
        )
    state, hook = HOOKS[name]
    losses, weights = face.train(model(), hook, state(torch.distributed), steps=50, **options)
    if face.is_own:
        torch.distributed.destroy_process_group()
    return losses, weights


# spec: A2 torch's own communication hooks, whose callbacks wait for calls, train on backend muster and in muster.nn.parallel
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.002}], ids=["one bucket", "many"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("face", FACES)
def test_torchs_hooks_train(face, name, size, options):
    options = options | ({"meeting": meeting_file()} if face == "muster" else {})
    ranks = on_ranks(size, face, trains_by_torchs_hook, name, options)
    for losses, weights in ranks:
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert weights == ranks[0][1]


def trains_by_own_hook(face, rank, size, hook, options):
    state = own_powerSGD_hook.PowerSGDState(start_powerSGD_iter=2)
    return face.train(model(), hook, state, steps=50, **options)


# spec: K9 muster's own PowerSGD hooks train
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.002}], ids=["one bucket", "many"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "hook", [own_powerSGD_hook.powerSGD_hook, own_powerSGD_hook.batched_powerSGD_hook], ids=str
)
def test_own_powerSGD_hooks_train(hook, size, options):
    ranks = on_ranks(size, "muster", trains_by_own_hook, hook, options)
    for losses, weights in ranks:
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert weights == ranks[0][1]


# ---- deadlines


def times_out_beside(face, rank, size):
    """A callback of one group that does not return; calls of others, for which rank 1 does not come."""
    held = face.dist.new_group([0, 1])
    short = [face.dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1)) for _ in range(3)]
    face.dist.barrier()
    entered, returns = threading.Event(), threading.Event()

    def stays(future):
        entered.set()
        returns.wait()

    future = face.sum_later(torch.ones(3), held)
    asks = threading.Thread(
        target=lambda: future.add_done_callback(stays)
    )  # which calls it itself where it is done already
    asks.start()
    assert entered.wait(LIMIT_S)
    if rank == 0:
        waited, polled, asked = (
            face.dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in short
        )
        with pytest.raises(RuntimeError, match="waited 1"):
            waited.wait()
        while not polled.is_completed():
            pass
        assert not polled.is_success() and "waited 1" in str(polled.exception())
        with pytest.raises(RuntimeError, match="waited 1"):
            asked.get_future().wait()
    # Calls of the group whose callback stays go on too, and their futures come.
    assert face.sum_later(torch.ones(3), held).wait()[0].tolist() == [2.0] * 3
    returns.set()
    asks.join()
    face.dist.barrier()


# spec: E3 timeouts: a call's deadline fires while a callback does not return, for those who wait, poll and have its future
@pytest.mark.parametrize("face", FACES)
def test_deadlines_fire_beside_callbacks(face):
    meeting = meeting_file()

    def rank_body(rank):
        known = Face(face, rank, 2, meeting)
        times_out_beside(known, rank, 2)
        try:
            known.dist.destroy_process_group()
        except RuntimeError:
            pass  # of the groups that timed out

    run_ranks(2, rank_body)


# ---- the end of the interpreter

ENDING_PROGRAM = """
import sys, threading, time
import torch, muster as dist

rank, what = int(sys.argv[1]), sys.argv[3]
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group(store=store, rank=rank, world_size=2)
entered = threading.Event()

def callback(done):
    entered.set()
    while what == "polls":
        entered.wait(0.001)
        time.sleep(0.001)
    while what == "computes":
        pass
    if what == "stays":
        threading.Event().wait()
    for _ in range(200):
        sum(range(10_000))
    print("returned", flush=True)

if rank == 0:
    dist.all_reduce(torch.ones(3), async_op=True).get_future().add_done_callback(callback)
    store.set("asked", "")
    entered.wait()
else:
    store.wait(["asked"])
    dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


def printed_by(program, *arguments):
    """Runs a program on two ranks, given rank and meeting file; what each printed. Both must exit with 0."""
    meeting = meeting_file()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), meeting, *arguments],
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    return printed


# spec: E3 get_future: a process ends while a callback of Python's runs, and waits for one that returns
@pytest.mark.parametrize("what", ["returns", "stays", "polls", "computes"])
def test_a_process_ends_while_callbacks_run(what):
    printed = printed_by(ENDING_PROGRAM, what)
    assert printed == ["returned\n" if what == "returns" else "", ""]


DAEMON_PROGRAM = """
import sys, threading
import torch, muster as dist

rank, what = int(sys.argv[1]), sys.argv[3]
dist.init_process_group(init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist.barrier()
entered = threading.Event()

def call():
    entered.set()
    while what == "calls" or rank == 0:
        dist.all_reduce(torch.ones(3))

threading.Thread(target=call, daemon=True).start()
entered.wait()
"""


# spec: E3 H7 a process ends, without a word, while a daemon thread is in a call
@pytest.mark.parametrize("what", ["calls", "waits"])
def test_a_process_ends_while_a_daemon_thread_is_in_a_call(what):
    assert printed_by(DAEMON_PROGRAM, what) == ["", ""]


LATE_PROGRAM = """
import atexit, sys

@atexit.register
def last():
    import torch
    import muster as dist
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    print(future.then(lambda done: done.value()[0].tolist()).wait())
    dist.destroy_process_group()

import muster as dist
dist.init_process_group(init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
"""


# spec: E3 get_future: an exit handler that was registered before muster was imported still gets its callbacks
def test_an_earlier_exit_handler_makes_calls():
    assert printed_by(LATE_PROGRAM) == ["[2.0, 2.0, 2.0]\n"] * 2


# ---- tensors whose copies run Python


class Counted(torch.Tensor):
    """A tensor whose every operation runs Python."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        def plain(given):
            return given.held if isinstance(given, Counted) else given

        result = function(*map(plain, arguments), **(options or {}))
        if function._schema.name.endswith("_"):
            return arguments[0]
        return (
            Counted(result)
            if isinstance(result, torch.Tensor) and result.dtype == arguments[0].dtype
            else result
        )


def asked_from_all_sides(face, rank, size):
    for turn in range(30):
        tensors = [Counted(torch.full((100,), float(i))) for i in range(4)]
        works = [face.dist.all_reduce(each, async_op=True) for each in tensors]
        stop = threading.Event()

        def ask(stop=stop, works=works):
            while not stop.is_set():
                for work in works:
                    work.get_future()
                    assert not work.is_completed() or work.exception() is None
                    assert work._source_rank() == -1

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for i, work in enumerate(works):
                if turn % 2:
                    work.wait()
                else:
                    work.get_future().wait()
                assert torch.equal(tensors[i].held, torch.full((100,), float(i * size)))
        finally:
            stop.set()
            for thread in threads:
                thread.join()


# spec: E3 a call on tensors whose copies run Python ends while other threads ask its Work
def test_python_tensors_end_while_threads_ask():
    on_ranks(
        2, "muster", asked_from_all_sides
    )  # stock torch hands a backend what such a tensor makes of the call
