# SPDX-License-Identifier: BSD-3-Clause
"""Programs of stock torch under `muster run` and `python -m muster.torch`, without a flag or an
edit.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from ranks import LIMIT_S, sampled
from scratch import reserve_port

import muster as dist

MUSTER = pathlib.Path(dist.__file__).parents[2] / "bin/muster"
HEAD = (
    "import datetime, os, sys, torch, torch.distributed as dist\n"
    "LIMIT = datetime.timedelta(seconds=60)\n"
)

PLAIN = (
    HEAD
    + """
dist.init_process_group(sys.argv[1], timeout=LIMIT)
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print("sum", int(x[0]), dist.get_backend(), flush=True)
dist.destroy_process_group()
"""
)
# As accelerate's PartialState begins: by the environment, then objects and barriers.
ACCELERATE = (
    HEAD
    + """
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29500")
dist.init_process_group(backend=sys.argv[1], timeout=LIMIT)
dist.barrier()
told = [None] * dist.get_world_size()
dist.all_gather_object(told, (rank, local))
first = [told if rank == 0 else None]
dist.broadcast_object_list(first, src=0)
dist.barrier()
print("sum", sum(r + 1 for r, _ in first[0]), dist.get_backend(), flush=True)
dist.destroy_process_group()
"""
)
# As Lightning's environment plugin does: it reads the variables and hands rank and size over, then
# makes groups.
LIGHTNING = (
    HEAD
    + """
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for name in ("MASTER_ADDR", "MASTER_PORT"):
    os.environ[name] = str(os.environ[name])
dist.init_process_group(sys.argv[1], rank=rank, world_size=size, timeout=LIMIT)
group = dist.new_group(timeout=LIMIT)
net = torch.nn.Linear(2, 1, bias=False)
net = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
torch.nn.init.zeros_(net.module.weight)
(net(torch.ones(1, 2)) * 1.5 * (rank + 1)).sum().backward()
dist.barrier(group)
print("sum", int(net.module.weight.grad.sum() * size / 3), dist.get_backend(), flush=True)
dist.destroy_process_group()
"""
)
# Two runs end while others wait, the third goes through.
RESTARTED = (
    HEAD
    + """
run = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group(sys.argv[1], timeout=LIMIT)
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
if run < 2 and dist.get_rank() == run:
    os._exit(3)
if run < 2:
    dist.barrier()
print("sum", int(x[0]), dist.get_backend(), flush=True)
dist.destroy_process_group()
"""
)
RPC = (
    HEAD
    + """
import torch.distributed.rpc as rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
print("sum", int(rpc.rpc_sync("worker0", torch.add, (torch.ones(1), 2))), sys.argv[1], flush=True)
rpc.shutdown()
"""
)
PROGRAMS = {
    "plain": PLAIN,
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    "restarted": RESTARTED,
    "rpc": RPC,
}


def write(folder, text):
    program = folder / "program.py"
    program.write_text(text)
    return program


def said_by(command, **variables):
    environment = os.environ | {"PYTHON_EXEC": sys.executable} | variables
    ended = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted(re.sub(r"^\[\d+\] ", "", line) for line in ended.stdout.splitlines())


def launched(program, *words, options=()):
    return [MUSTER, "run", "--standalone", "--nproc-per-node", "2", *options, program, *words]


# spec: J5 a program of stock torch finds MASTER_PORT free, in every restart: backend muster, and
# Gloo in programs that know nothing of muster
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name, backend", sampled(len(PROGRAMS), list(PROGRAMS), ["muster", "gloo"])
)
def test_under_muster_run(name, backend, tmp_path):
    text = ("import muster.torch\n" if backend == "muster" else "") + PROGRAMS[name]
    options = ["--max-restarts", "2"] if name == "restarted" else []
    assert (
        said_by(launched(write(tmp_path, text), backend, options=options))
        == [f"sum 3 {backend}"] * 2
    )


WHOSE = (
    HEAD
    + """
def rank_main(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=2, timeout=LIMIT)
    whose()

def whose():
    x = torch.ones(2)
    dist.all_reduce(x)
    engine = type(dist.group.WORLD._get_backend(x.device)).__name__
    gloo = dist.ProcessGroupGloo.__name__
    os.write(1, f"{int(x[0])} by {engine} {gloo} {sys.argv[1:]}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=LIMIT)
        whose()
    else:
        torch.multiprocessing.spawn(rank_main, (int(sys.argv[1]),), nprocs=2)
"""
)


def by(engine, *words):
    return [f"2 by {engine} {engine} {[str(word) for word in words]}"] * 2


# spec: A2.replace replace_gloo for programs that are not edited: an option of the launcher and a
# variable, for files and modules
def test_replaced_by_the_launcher(tmp_path):
    program = write(tmp_path, WHOSE)
    assert said_by(launched(program, "a", "-m")) == by("ProcessGroupGloo", "a", "-m")
    assert said_by(launched(program, "a", "-m", options=["--replace-gloo"])) == by(
        "ProcessGroupMuster", "a", "-m"
    )
    assert said_by(launched(program, "--x=1"), MUSTER_REPLACE_GLOO="1") == by(
        "ProcessGroupMuster", "--x=1"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    assert said_by(
        launched("program", "a", options=["--replace-gloo", "-m"]), PYTHONPATH=path
    ) == by("ProcessGroupMuster", "a")


# spec: A2.replace replace_gloo by python -m muster.torch, in the processes that the program spawns
# too
def test_replaced_by_running_the_module(tmp_path):
    program, port = write(tmp_path, WHOSE), reserve_port()
    assert said_by([sys.executable, "-m", "muster.torch", program, port]) == by(
        "ProcessGroupMuster", port
    )


# spec: A2 replace_gloo: what cannot be is said
def test_what_cannot_be_replaced():
    binary = subprocess.run(
        [MUSTER, "run", "--replace-gloo", "/bin/true"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert binary.returncode == 2 and "--replace-gloo is for Python programs" in binary.stderr
    nothing = subprocess.run(
        [sys.executable, "-m", "muster.torch"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert nothing.returncode == 2 and "usage: python -m muster.torch" in nothing.stderr


MADE_BY_HAND = (
    HEAD
    + """
rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                      is_master=rank == 0, timeout=LIMIT)
for turn in range(2):  # as torchft does for every quorum: a group from parts, again and again
    group = dist.ProcessGroup(dist.PrefixStore(f"turn{turn}", store), rank, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(dist.PrefixStore(f"turn{turn}", store), rank, 2, timeout=LIMIT)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    x = torch.full((4,), rank + 1.0)
    group.allreduce([x], dist.AllreduceOptions()).wait()
    assert x.tolist() == [3.0] * 4
    out = [torch.zeros(4) for _ in range(2)]
    group.allgather([out], [x]).wait()
    backend.broadcast([x]).wait()
    group.barrier().wait()
    backend.shutdown()
own = type(backend)(dist.PrefixStore("own", store), rank, 2)
told = [None, None]
dist.all_gather_object(told, rank, group=own)
assert told == [0, 1]
os.write(1, f"sum {int(x[0])} {type(backend).__name__}\\n".encode())
own.shutdown()
"""
)


# spec: A2.constructor a backend made by its constructor, as programs make a ProcessGroupGloo
def test_made_by_hand(tmp_path):
    program = write(tmp_path, MADE_BY_HAND)
    assert (
        said_by(launched(program, options=["--replace-gloo"])) == ["sum 3 ProcessGroupMuster"] * 2
    )
