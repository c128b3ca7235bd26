# SPDX-License-Identifier: BSD-3-Clause
"""Processes that end while calls and callbacks of theirs are under way."""

import subprocess
import sys

import pytest
from ranks import LIMIT_S, meeting_file

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
    """Runs a program on two ranks, given rank and meeting file; what each printed. Both must exit
    with 0.
    """
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


# spec: E3 get_future: a process ends while a callback of Python's runs, and waits for one that
# returns
@pytest.mark.sampled(2)
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
@pytest.mark.sampled(1)
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


# spec: E3 get_future: an exit handler that was registered before muster was imported still gets its
# callbacks
def test_an_earlier_exit_handler_makes_calls():
    assert printed_by(LATE_PROGRAM) == ["[2.0, 2.0, 2.0]\n"] * 2
