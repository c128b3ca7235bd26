# SPDX-License-Identifier: BSD-3-Clause
"""Callbacks of users' that run when a call is done: they may wait, sleep, never return."""

import concurrent.futures
import datetime
import re
import threading
import time

import pytest
import torch
from ranks import LIMIT_S, meeting_file, run_ranks

from faces import FACES, Face, on_ranks

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


# spec: E3 get_future: a callback may wait for the future, and for the callbacks, of a call that was
# started after its own
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


# ---- deadlines


def times_out_beside(face, rank, size):
    """A callback of one group that does not return; calls of others, for which rank 1 does not
    come.
    """
    held = face.dist.new_group([0, 1])
    short = [face.dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3)) for _ in range(3)]
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
        with pytest.raises(RuntimeError, match=r"waited [3-9]"):
            waited.wait()
        while not polled.is_completed():
            pass
        assert not polled.is_success() and re.search("waited [3-9]", str(polled.exception()))
        with pytest.raises(RuntimeError, match=r"waited [3-9]"):
            asked.get_future().wait()
    # Calls of the group whose callback stays go on too, and their futures come.
    assert face.sum_later(torch.ones(3), held).wait()[0].tolist() == [2.0] * 3
    returns.set()
    asks.join()
    face.dist.barrier()


# spec: E3 timeouts: a call's deadline fires while a callback does not return, for those who wait,
# poll and have its future
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
