# SPDX-License-Identifier: BSD-3-Clause
"""The program of lock_order_test.py: each function has muster call functions of Python's, from
every thread that does, while the main thread asks muster for state that its locks guard.
"""

import datetime
import gc
import os
import signal
import sys
import threading

import torch
from passing_store import passing_store

import muster as dist
from muster import elastic, fsdp, rpc
from muster.algorithms.join import Join
from muster.nn.parallel import DistributedDataParallel

LIMIT = datetime.timedelta(seconds=60)


def ask():
    """Calls that take a lock briefly."""
    return dist.is_initialized(), dist.get_rank(), elastic.epoch(), dist.group.WORLD.group_desc


def in_job(body):
    dist.init_process_group(timeout=LIMIT)
    body()
    dist.destroy_process_group()


def group_hooks():
    def body():
        group, seen = dist.new_group(), []
        group.register_pre_hook(1, lambda args: seen.append(ask()))
        group.register_post_hook(1, lambda args: seen.append(ask()))
        group.register_abort_hook(1, lambda: seen.append(ask()))
        dist.all_reduce(torch.ones(3), group=group)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        done = work.get_future().then(lambda future: ask())
        work.wait()
        done.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
        before = len(seen)
        dist.abort_process_group(group)
        assert before >= 4 and len(seen) > before

    in_job(body)


def objects():
    def body():
        class Asks:
            def __reduce__(self):
                ask()
                return (set, ())

        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, Asks())
        dist.broadcast_object_list(gathered, src=0)
        dist.monitored_barrier(timeout=LIMIT)

    in_job(body)


def model_hooks():
    def body():
        def hook(state, bucket):
            ask()
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(None, hook)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()

        class Uneven:
            pass

        with Join([DistributedDataParallel(torch.nn.Linear(4, 4))]) as _:
            pass
        other = DistributedDataParallel(torch.nn.Linear(4, 4))
        with Join([other]):
            for _ in range(1 + dist.get_rank()):
                other(torch.ones(2, 4)).sum().backward()

    in_job(body)


def unit_hooks():
    def body():
        model = fsdp.fully_shard(torch.nn.Linear(4, 4))
        model.set_all_reduce_hook(lambda gradients: ask())
        model.set_reshard_after_backward(True)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model.clip_grad_norm_(1.0)
        model.unshard()
        model.reshard()

    in_job(body)


def python_store():
    def ask_of_store():
        return dist.is_initialized(), elastic.epoch()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    below = dist.FileStore(sys.argv[2] + "/store", size)
    store = passing_store(dist.Store, below, ask_of_store)
    store.set_timeout(LIMIT)
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=LIMIT)
    dist.new_group([0])
    dist.barrier()
    dist.destroy_process_group()


def python_backend():
    class Asking(dist.ProcessGroupBackend):
        def __init__(self, store, rank, size, timeout):
            super().__init__()

        def supports(self, op, dtype, device):
            return ask() is not None

        def submit(self, request):
            ask()

        def close(self, timeout):
            ask()

        def abort(self, reason):
            ask()

    dist.Backend.register_backend("asking", Asking, devices=["cpu"])

    def body():
        group = dist.new_group(backend="asking")
        dist.barrier(group)
        dist.destroy_process_group(group)

    in_job(body)


def answered(value):
    rpc.get_worker_infos()
    return value + 1


@rpc.functions.async_execution
def answered_later(value):
    other = f"worker{1 - rpc.get_worker_info().id}"
    return rpc.rpc_async(other, answered, (value,)).then(lambda future: future.wait() + 1)


class Kept:
    def add(self, value):
        return value + rpc.get_worker_info().id


def remote_calls():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    other = f"worker{1 - rank}"
    assert rpc.rpc_sync(other, answered, (1,)) == 2
    assert rpc.rpc_sync(other, answered_later, (1,)) == 3
    future = rpc.rpc_async(other, answered, (1,)).then(lambda each: (rpc.get_worker_info(), each))
    future.wait()
    kept = rpc.remote(other, Kept)
    assert kept.owner_name() == other and not kept.is_owner()
    assert kept.rpc_sync().add(1) == 2 - rank
    mine = rpc.RRef(torch.ones(2))
    assert rpc.rpc_sync(other, torch.add, (mine.to_here(), 1)).tolist() == [2, 2]
    try:
        rpc.rpc_sync(other, answered, ("text",))
    except TypeError:
        pass
    rpc.set_rpc_timeout(rpc.get_rpc_timeout())
    del kept, mine, future
    gc.collect()
    rpc.shutdown()


def epochs():
    """Rank 1 dies; the abort hook of rank 0 runs while the main thread asks for the epoch."""
    ran, go_on = threading.Event(), threading.Event()
    state = elastic.State(w=torch.zeros(1), step=0)

    def hook():
        ran.set()
        go_on.wait(60)

    def train():
        if elastic.epoch() == 1:
            dist.group.WORLD.register_abort_hook(1, hook)
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while not ran.is_set():
                elastic.epoch()
            assert elastic.epoch() == 1
            go_on.set()
        dist.all_reduce(state.w)
        state.step += 1
        state.commit()

    print("outcome", elastic.run(state, train), state.step, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("went well", flush=True)
