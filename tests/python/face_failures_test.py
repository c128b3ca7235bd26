# SPDX-License-Identifier: BSD-3-Clause
"""`import muster as dist`: what a rank that fails, dies or is interrupted means to it and to the
others.
"""

import ctypes
import datetime
import os
import signal
import threading
import time
import traceback

import pytest
import torch
from ranks import LIMIT_S, fork, meeting_file, run_ranks
from thread_ranks import on_threads, row, same

import muster as dist
from muster import _C


# spec: H1 in Python
def test_monitored_barrier():
    def body(rank, size):
        if rank == 0:
            with pytest.raises(
                dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier in 500 ms"
            ) as caught:
                dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=500))
            assert caught.value.ranks == [1]
        dist.barrier()

    on_threads(2, body)


# spec: J2 the first failure of threads is rethrown with its rank and text
def test_spawn_of_threads_names_the_failure():
    def body(rank, size):
        if rank == 1:
            raise KeyError("what went wrong")
        dist.all_reduce(torch.ones(2))

    with pytest.raises(dist.SpawnError, match="(?s)rank 1.*KeyError.*what went wrong"):
        on_threads(3, body)


# spec: H7 exception classes in Python
def test_killed_rank_is_named():
    name = meeting_file()

    def body(rank):
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=3)
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank 2") as caught:
            dist.all_reduce(torch.ones(4))
        assert isinstance(caught.value, dist.DistError) and isinstance(caught.value, RuntimeError)
        assert caught.value.ranks == [2] and caught.value.code == "peer failed"

    run_ranks(3, body, killed=(2,))


def interrupt_the_next_call():
    """As Ctrl-C does: to the process, as soon as its main thread is in a call of muster's."""

    def interrupt():
        while not _C.main_thread_is_interruptible():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


@pytest.mark.parametrize("set_anew", [False, True])
def test_interrupt_ends_a_blocked_call(set_anew):
    """Ctrl-C on rank 0, which waits for rank 1; rank 1 is told. Also where Python's handler was set
    after the job began, as notebooks do.
    """
    name = meeting_file()
    inside = fork.Event()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        dist.barrier()
        if set_anew:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if rank == 0:
            interrupt_the_next_call()
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(4))
            inside.set()
        else:
            assert inside.wait(LIMIT_S)
            with pytest.raises(dist.DistBackendError, match="rank 0"):
                dist.all_reduce(torch.ones(4))  # has rank 0's part already, and may do
                dist.all_reduce(torch.ones(4))

    run_ranks(2, body)


def test_a_handler_that_is_set_after_init_is_honoured():
    """The program's own handler runs once the call has ended, and nothing is aborted."""
    name = meeting_file()
    pressed = fork.Event()

    def press():
        while not _C.main_thread_is_interruptible():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        pressed.set()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        dist.barrier()
        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        if rank == 0:
            threading.Thread(target=press, daemon=True).start()
        else:
            assert pressed.wait(LIMIT_S)
        x = torch.ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [2] * 4
        dist.barrier()
        assert seen == ([signal.SIGINT] if rank == 0 else [])

    run_ranks(2, body)


def test_a_handler_that_c_code_has_set_is_honoured():
    """SIGINT that C code ignores, or leaves to the system, is not taken from it."""
    name = meeting_file()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        dist.barrier()
        if rank == 0:
            libc = ctypes.CDLL(None)
            libc.signal.restype = ctypes.c_void_p
            libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            libc.signal(signal.SIGINT, 1)  # SIG_IGN
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        dist.barrier()

    run_ranks(2, body)


@pytest.mark.parametrize("batch", [False, True])
def test_interrupt_ends_the_wait_for_a_message_of_another_group(batch):
    """It ends that group and no other one."""
    name = meeting_file()
    after = fork.Event()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        pair = dist.new_group([0, 1])
        if rank == 0:
            x, y = torch.zeros(4), torch.zeros(4)
            if batch:
                first, work = dist.batch_isend_irecv(
                    [dist.P2POp(dist.irecv, y, 1), dist.P2POp(dist.irecv, x, 1, pair)]
                )
            else:
                first, work = dist.irecv(y, 1), dist.irecv(x, 1, pair)
            interrupt_the_next_call()
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            after.set()
            first.wait()
            same(y, torch.ones(4))
        else:
            assert after.wait(LIMIT_S)
            dist.send(torch.ones(4), 0)
            with pytest.raises(dist.DistBackendError, match="rank 0"):
                dist.recv(torch.zeros(4), 0, pair)
        dist.barrier()

    run_ranks(2, body)


class Deed:
    """Does something where it is pickled: within a call of an object collective, on the thread that
    calls.
    """

    def __init__(self, act):
        self.act = act

    def __reduce__(self):
        self.act()
        return int, (7,)


def test_interrupt_of_a_forked_child_is_its_own():
    name = meeting_file()

    def forked():
        """A child that waits for an interrupt, and a pipe that says so."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a failed rank leaves no process that holds the test's output open
            try:
                os.write(writing, b"x")
                while True:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 1) == b"x"
        return child

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        children = [forked() for _ in range(3)] if rank == 0 else []

        def interrupt_children():
            for child in children:
                os.kill(child, signal.SIGINT)
                assert os.waitpid(child, 0)[1] == 0

        out = [None, None]
        dist.all_gather_object(out, Deed(interrupt_children))
        assert out == [7, 7]
        for _ in range(100):
            # If they have woken this process's thread, it ends the unfinished call when it runs.
            dist.barrier()

    run_ranks(2, body)


def test_forked_child_keeps_out_of_the_job():
    name = meeting_file()

    def child():
        signal.alarm(60)  # ends it where a call hangs
        for call in (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.send(torch.ones(4), 1),
            lambda: dist.barrier(),
            lambda: dist.new_group([0]),
        ):
            with pytest.raises(dist.DistError):
                call()

    def body(rank):
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        dist.barrier()
        if rank == 0:
            forked = os.fork()
            if forked == 0:
                try:
                    child()
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            assert os.waitpid(forked, 0)[1] == 0
        x = row(rank)
        dist.all_reduce(x)
        same(x, row(0) + row(1))
        dist.destroy_process_group()

    run_ranks(2, body)


def test_interrupt_ends_the_wait_for_others():
    name = meeting_file()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt_the_next_call()
        with pytest.raises(KeyboardInterrupt):
            dist.init_process_group(init_method="file://" + name, rank=0, world_size=2)

    run_ranks(1, body)
