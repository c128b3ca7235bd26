# SPDX-License-Identifier: BSD-3-Clause
"""Signals that are not Ctrl-C: timers, a scheduler's notice, ended children. They end no call."""

import ctypes
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from ranks import LIMIT_S, fork, meeting_file, run_ranks

import muster as dist
from muster import _C

SIGNALS = (signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD)
libc = ctypes.CDLL(None, use_errno=True)


def threads():
    return set(map(int, os.listdir("/proc/self/task")))


def blocked(thread):
    with open(f"/proc/self/task/{thread}/status") as status:
        return int(next(line for line in status if line.startswith("SigBlk")).split()[1], 16)


def join(name, rank, size=2):
    before = threads()
    dist.init_process_group(init_method="file://" + name, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    return threads() - before


def during_calls(rank, act, done, rounds=20):
    """Rank 0 waits in `rounds` calls; in each, `act` happens on another thread of it, and only then
    does rank 1 come.
    """
    for i in range(rounds):
        x = torch.ones(4)
        if rank == 0:

            def interrupt(number=i):
                while not _C.main_thread_is_interruptible():
                    time.sleep(0.001)
                act()
                with done.get_lock():
                    done.value = number + 1

            acting = threading.Thread(target=interrupt, daemon=True)
            acting.start()
            dist.all_reduce(x)
            acting.join()
        else:
            while done.value <= i:
                time.sleep(0.001)
            dist.all_reduce(x)
        assert x.tolist() == [2.0] * 4


def test_threads_of_a_job_take_no_signals_of_the_program():
    name = meeting_file()

    def body(rank):
        ours = join(name, rank)
        assert ours
        for thread in ours:
            for each in (*SIGNALS, signal.SIGINT, signal.SIGTERM):
                assert blocked(thread) & 1 << each - 1, (thread, each)
        dist.destroy_process_group()

    run_ranks(2, body)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_any_thread_ends_no_call(number):
    name, done = meeting_file(), fork.Value("i", 0)

    def body(rank):
        handled = []
        signal.signal(number, lambda *_: handled.append(1))
        join(name, rank)

        def to_all_threads():
            own = (os.getpid(), threading.get_native_id())
            for thread in threads().difference(own):
                libc.syscall(234, os.getpid(), thread, number)  # tgkill
            os.kill(os.getpid(), number)

        during_calls(rank, to_all_threads, done)
        assert rank != 0 or handled
        dist.destroy_process_group()

    run_ranks(2, body)


def ends_no_call(number, act, blocked=()):
    """The signal that a handler of rank 0's own gets, or would get."""
    name, done = meeting_file(), fork.Value("i", 0)

    def body(rank):
        signal.signal(number, lambda *_: None)
        join(name, rank)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        during_calls(rank, act, done)
        dist.destroy_process_group()

    run_ranks(2, body)


def test_a_signal_that_the_main_thread_blocks_ends_no_call():
    number = signal.SIGUSR1
    ends_no_call(number, lambda: os.kill(os.getpid(), number), blocked={number})


def test_children_that_end_end_no_call():
    ends_no_call(signal.SIGCHLD, lambda: subprocess.run(["true"], check=True))


def test_a_program_that_a_callback_starts_can_be_ended():
    """It inherits the signal mask of the thread that starts it."""
    name = meeting_file()

    def body(rank):
        join(name, rank)
        ended = []

        def start(_):
            child = subprocess.Popen(["sleep", "100"])
            child.terminate()
            ended.append(child.wait(LIMIT_S))

        future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(start)
        future.wait()
        assert ended == [-signal.SIGTERM]
        dist.destroy_process_group()

    run_ranks(2, body)
