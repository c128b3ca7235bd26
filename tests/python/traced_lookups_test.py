# SPDX-License-Identifier: BSD-3-Clause
"""Lookups of a process's groups and meshes, inside a function that torch.compile traces."""

import contextlib
import pathlib
import subprocess
import sys

import pytest
import torch
from ranks import LIMIT_S, meeting_file, run_ranks
from torch._dynamo.testing import CompileCounterWithBackend

import muster as dist
from muster import _functional_collectives as funcol
from muster import distributed_c10d as c10d

BIN = pathlib.Path(dist.__file__).parents[2] / "bin"


def on_ranks(size, body):
    meeting = meeting_file()

    def rank_body(rank):
        dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=size)
        body(rank, size)
        dist.destroy_process_group()

    run_ranks(size, rank_body)


def of_the_default_group(x):
    x = x + dist.get_rank() + 10 * dist.get_world_size() + sum(dist.get_process_group_ranks(None))
    if dist.is_initialized() and dist.get_backend() == "gloo":
        x = x + len(dist.get_backend_config()) + dist.get_pg_count() + dist.get_node_local_rank(3)
    if dist.supports_complex(dist.ReduceOp.SUM):
        x = x + dist.group.WORLD.rank() + 3 * dist.get_rank(dist.GroupMember.WORLD)
    group = c10d._get_default_group()
    return x + group.size() + dist.get_world_size(group) + c10d._group_or_default_group().rank()


def of_a_group(x, group):
    if not group:
        return x + dist.get_rank(group)
    x = x + group.rank() + 5 * group.size() + len(group.name()) + len(group.group_desc)
    x = x * dist.get_rank(group) + 7 * dist.get_world_size(group) + len(dist.get_backend(group))
    x = x + len(dist.get_process_group_ranks(group)) + dist.get_global_rank(group, 0)
    x = x + dist.get_group_rank(group, dist.get_rank()) + c10d._get_global_rank(group, 0)
    if group == dist.group.WORLD:
        x = x * 11
    if group != dist.GroupMember.NON_GROUP_MEMBER and not c10d._rank_not_in_group(group):
        x = x * 13
    name = c10d._get_process_group_name(group)
    x = x + c10d._resolve_process_group(name).size() + c10d._get_group_size_by_name(name)
    return x + c10d._get_group_size(group)


def of_a_mesh(x, mesh):
    x = x + mesh.size() + 10 * mesh.size(1) + 100 * mesh.shape[0] + mesh.ndim + mesh.get_rank()
    x = x + len(mesh.mesh_dim_names[0]) + len(mesh.device_type) + 7 * mesh.get_coordinate()[1]
    x = x + mesh.get_local_rank("ranks") + 3 * mesh.get_local_rank(mesh_dim=1)
    x = x + dist.get_world_size(mesh.get_group("ranks")) + mesh.get_group(1).rank()
    x = x + mesh["ranks"].size() + mesh["rows", "ranks"].ndim + mesh["ranks"].get_group().size()
    return funcol.all_reduce(x, "sum", mesh["ranks"].get_group())


def of_the_process(x):
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        x = x + 2
    if dist.get_debug_level() != dist.DebugLevel.DETAIL and dist.is_available():
        x = x * 3
    x = x + 5 * dist.is_gloo_available() + 7 * dist.is_nccl_available()
    x = x + 11 * dist.is_mpi_available() + 13 * dist.is_ucc_available()
    x = x + 17 * dist.is_xccl_available() + 19 * dist.is_torchelastic_launched()
    x = x + 23 * dist.is_backend_available("gloo") + 29 * dist.is_initialized()
    return x + len(dist.get_default_backend_for_device("cpu"))


def check(function, *given):
    """Traced, it is one graph for each of `given`, and says what it says untraced."""
    counter = CompileCounterWithBackend("eager")
    traced = torch.compile(function, fullgraph=True, backend=counter)
    for each in (*given, *given):
        x = torch.arange(1.0, 3.0)
        assert torch.equal(traced(x, *each), function(x, *each))
    assert counter.frame_count == len(given)


def lookups(rank, size):
    check(of_the_process, ())
    check(of_the_default_group, ())
    alone = [dist.new_group([each]) for each in range(size)]
    again = dist.new_group(list(range(size)))
    check(of_a_group, *((group,) for group in (dist.group.WORLD, again, alone[rank])))
    check(of_a_group, (alone[0],))
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("rows", "ranks"))
    turned = dist.init_device_mesh("cpu", (size, 1), mesh_dim_names=("ranks", "rows"))
    check(of_a_mesh, (mesh,), (turned,))


# spec: T4 lookups of ranks, sizes, groups and meshes, of backends and the debug level trace in one
# graph, anew for another group, and of a group without this process
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 2])
def test_lookups(size):
    on_ranks(size, lookups)


# spec: T4 in no lookup of the process or of the default group does torch.compile break the graph,
# with a default group or without
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lookups", [of_the_process, of_the_default_group])
def test_no_graph_breaks(lookups):
    def breaks():
        explained = torch._dynamo.explain(lookups)(torch.ones(2))
        return explained.graph_count, explained.break_reasons

    if lookups is of_the_process:
        assert not dist.is_initialized() and breaks() == (1, [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert breaks() == (1, [])
    finally:
        dist.destroy_process_group()


def training_step(rank, size):
    def step(x, weight):
        share = x.chunk(dist.get_world_size())[dist.get_rank()]
        total = funcol.all_reduce((share @ weight).square().sum(), "sum", dist.group.WORLD)
        return total / dist.get_world_size()

    x, weight = torch.ones(4, 3), torch.ones(3, 2, requires_grad=True)
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    traced(x, weight).backward()
    gradient, weight.grad = weight.grad, None
    step(x, weight).backward()
    assert torch.equal(gradient, weight.grad)


# spec: T4 a step that asks for its rank and the world's size
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 2])
def test_step(size):
    on_ranks(size, training_step)


def again_in_another_group(rank, meetings):
    def place(x):
        total = funcol.all_reduce(x, "sum", dist.group.WORLD)
        return total + 10 * dist.get_rank() + 100 * dist.get_world_size()

    traced = torch.compile(place, fullgraph=True, backend="eager")

    def check_here(size):
        assert traced(torch.ones(1)).item() == size + 10 * dist.get_rank() + 100 * size

    dist.init_process_group(init_method="file://" + meetings[0], rank=rank, world_size=3)
    check_here(3)
    dist.destroy_process_group()
    dist.init_process_group(init_method="file://" + meetings[1], rank=2 - rank, world_size=3)
    check_here(3)
    dist.barrier()
    if rank == 0:  # is left out
        with contextlib.suppress(dist.DistError):
            dist.destroy_process_group()
        return
    dist.shrink_group([2])
    check_here(2)
    dist.destroy_process_group()


# spec: T4 what is compiled knows the rank and the size of a default group that is made again
def test_another_default_group():
    run_ranks(3, again_in_another_group, [meeting_file(), meeting_file()])


PROGRAM = """
import os, signal, torch, muster as dist
from muster import elastic

state = elastic.State(step=0)
place = torch.compile(lambda x: x + dist.get_rank(), fullgraph=True, backend="eager")

def train():
    found = int(place(torch.zeros(1)).item())
    print(f"epoch {elastic.epoch()}: rank {dist.get_rank()}, compiled {found}", flush=True)
    assert found == dist.get_rank()
    dist.barrier()
    if elastic.epoch() == 1 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    state.commit()

print(elastic.run(state, train), flush=True)
"""


# spec: L6 T4 what is compiled in one epoch of a job knows its rank in the next
def test_elastic_epochs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [BIN / "muster", "run", "--standalone", "--nproc-per-node", "2", "--spares", "1"]
    ran = subprocess.run(
        [*command, "--elastic", "keep", "--max-restarts", "3", sys.executable, program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0 and ran.stdout.count("finished") == 2, ran.stdout + ran.stderr
