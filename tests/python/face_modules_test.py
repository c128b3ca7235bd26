# SPDX-License-Identifier: BSD-3-Clause
"""Modules by torch's paths, entry points, and tools/face, which compares all names."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from scratch import LIMIT_S
from thread_ranks import on_threads

import muster as dist
import muster.distributed as by_path

TREE = pathlib.Path(__file__).parents[2]


# spec: A8 F14 F19 U1 every public name of torch.distributed is muster's, or listed with the reason
def test_tool_compares_all_names():
    run = subprocess.run(
        [sys.executable, TREE / "tools/face"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert run.returncode == 0, run.stderr


# spec: U2 the stubs of the extension fit what programs write
def test_types_are_checked():
    mypy = TREE / ".cache/checks/bin/mypy"
    if not mypy.exists():
        pytest.skip("MUSTER_CHECKS=ON tools/setup brings mypy, which CI has")
    run = subprocess.run(
        [TREE / "tools/check_types"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_modules_by_torchs_path():
    import muster.distributed.algorithms.ddp_comm_hooks.default_hooks as by_long_path
    import muster.distributed.fsdp
    import muster.distributed.nn.functional
    from muster.algorithms.ddp_comm_hooks import default_hooks
    from muster.distributed.distributed_c10d import all_reduce, group

    assert by_long_path is default_hooks and muster.distributed.fsdp is muster.fsdp
    assert muster.distributed.nn.functional is muster.nn.functional
    assert all_reduce is dist.all_reduce is by_path.all_reduce and group is dist.group
    assert muster.fsdp.__spec__.name == "muster.fsdp"


# spec: U5.elastic muster.elastic: record, events, agent classes
def test_below_elastic_is_torchs():
    import torch.distributed.elastic.agent.server as theirs

    from muster.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from muster.elastic.agent.server import WorkerSpec
    from muster.elastic.multiprocessing import errors

    assert errors.record is record and issubclass(ChildFailedError, Exception)
    assert WorkerSpec is theirs.WorkerSpec and theirs.__spec__.name.startswith("torch.")


# spec: L6 muster.elastic itself is muster's, by either path and in either order of imports
def test_elastic_is_musters():
    from muster import elastic
    from muster.distributed import elastic as by_long_path

    assert elastic is by_long_path is dist.elastic
    assert (
        elastic.State.__module__ == "muster.elastic" and elastic.__spec__.name == "muster.elastic"
    )
    with pytest.raises(ModuleNotFoundError, match="muster.elastic.nothing"):
        import muster.elastic.nothing  # noqa: F401


@pytest.mark.parametrize("name", ["pipelining", "_composable"])
def test_what_is_refused_says_what_to_use(name):
    for path in ("muster", "muster.distributed"):
        with pytest.raises(
            ModuleNotFoundError, match=rf"torch\.distributed\.{name.partition('.')[0]}.*'muster'"
        ):
            __import__(f"{path}.{name}")
    with pytest.raises(AttributeError, match="torch.distributed"):
        getattr(dist, name.partition(".")[0])
    with pytest.raises(ModuleNotFoundError, match="muster.nothing"):
        import muster.nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import muster.distributed.nothing  # noqa: F401


def agree(rank, size):
    from muster import collective_utils as utils

    world = dist.group.WORLD
    assert utils.broadcast(lambda: f"of {rank}", rank=1, pg=world) == "of 1"
    assert utils.broadcast(7) == 7 and utils.all_gather(7) == [7]
    assert utils.all_gather(lambda: rank, stage_name="one", pg=world) == list(range(size))

    def fails():
        raise ValueError("no such thing")

    with pytest.raises(RuntimeError, match="Rank 1 failed: stage two: exception no such thing"):
        utils.broadcast(fails, stage_name="two", rank=1, pg=world)
    with pytest.raises(RuntimeError, match="rank 1 failed: no such thing"):
        utils.all_gather(fails if rank == 1 else rank, pg=world)
    with pytest.raises(RuntimeError, match="different stages"):
        utils.all_gather(rank, stage_name=f"stage {rank}", pg=world)
    with pytest.raises(TypeError, match="index 1"):
        utils.all_gather_object_enforce_type(world, [None] * size, rank if rank == 0 else "text")


# spec: U1 torch.distributed.collective_utils' functions: a value or an error, on all ranks
def test_collective_utils():
    on_threads(2, agree)


# spec: U4.registered U4.options U5.rpc_options what programs for torch's RPC name
def test_rpc_names():
    from muster import rpc
    from muster.rpc.backend_registry import register_backend

    options = rpc.ProcessGroupRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    assert options.num_worker_threads == rpc.constants.DEFAULT_NUM_WORKER_THREADS == 16
    assert rpc.backend_registered("TENSORPIPE") and not rpc.backend_registered("MINE")
    made = rpc.construct_rpc_backend_options(rpc.BackendType.TENSORPIPE, rpc_timeout=5)
    assert made.rpc_timeout == 5
    with pytest.raises(ValueError, match="'MINE'"):
        rpc.construct_rpc_backend_options("MINE")
    with pytest.raises(RuntimeError, match="already registered"):
        register_backend("TENSORPIPE", None, None)


class Here:
    """An agent that runs every call itself."""

    def __init__(self, name, rank):
        self.info, self.ended = (name, rank), False

    def rpc_async(self, to, func, args, kwargs, timeout):
        done = torch.futures.Future()
        done.set_result((to, func(*args, **kwargs), timeout))
        return done

    def get_worker_info(self, worker_name=None):
        return self.info

    def get_worker_infos(self):
        return [self.info]

    def shutdown(self, graceful, timeout):
        self.ended = graceful


# spec: U4.register_backend rpc.register_backend: init_rpc starts the agent that was registered, and
# calls go there
def test_a_registered_rpc_backend_is_used():
    from muster import rpc

    made, options = [], []

    def construct(rpc_timeout, init_method, **kwargs):
        options.append((rpc_timeout, init_method, kwargs))
        return rpc.RpcBackendOptions(rpc_timeout=7, init_method=init_method)

    def start(store=None, name=None, rank=-1, world_size=None, rpc_backend_options=None):
        assert (rank, world_size, rpc_backend_options.rpc_timeout) == (0, 1, 7)
        made.append(Here(name, rank))
        return made[-1]

    kind = rpc.register_backend("HERE", construct, start)
    assert rpc.backend_registered("HERE") and rpc.BackendType.HERE == kind
    assert kind.value == rpc.backend_registry.BackendValue(construct, start)
    with pytest.raises(RuntimeError, match="already registered"):
        rpc.register_backend("HERE", construct, start)
    rpc.init_rpc("me", backend=kind, rank=0, world_size=1)
    assert rpc.is_initialized() and len(options) == 1
    assert rpc.rpc_sync("any", max, (3, 4)) == ("any", 4, 7)
    assert rpc.rpc_async(1, max, (3, 4), timeout=2).wait() == (1, 4, 2)
    assert rpc.get_worker_info() == ("me", 0) and rpc.get_worker_infos() == [("me", 0)]
    with pytest.raises(dist.DistError, match="has no `remote`"):
        rpc.remote("any", max, (3, 4))
    with pytest.raises(ValueError, match="running already"):
        rpc.init_rpc("me", backend=kind, rank=0, world_size=1)
    rpc.shutdown()
    assert made[0].ended and not rpc.is_initialized()


# spec: U4.register_backend a registered backend may start muster's own agent, with other options
def test_a_registered_rpc_backend_may_be_muster_s_own(tmp_path):
    from muster import rpc

    def start(**given):
        given["rpc_backend_options"].rpc_timeout = 9
        return rpc.init_backend(rpc.BackendType.NATIVE, **given)

    kind = rpc.register_backend(
        "PATIENT",
        lambda rpc_timeout, init_method: rpc.RpcBackendOptions(init_method=init_method),
        start,
    )
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meeting")
    rpc.init_rpc("me", backend=kind, rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.get_rpc_timeout() == 9 and rpc.rpc_sync("me", max, (3, 4)) == 4
    rpc.shutdown()
    assert not rpc.is_initialized()

    kind = rpc.register_backend("NOTHING", lambda *_: None, lambda **_: None)
    with pytest.raises(ValueError, match="has started no agent"):
        rpc.init_rpc("me", backend=kind, rank=0, world_size=1)
    assert not rpc.is_initialized()


PROGRAM = """
import sys
import torch
import muster as dist
from muster.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group()
    x = torch.ones(1)
    dist.all_reduce(x)
    print("ended", dist.get_rank(), x.item(), sys.argv[1:], flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def started(*arguments):
    run = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stderr
    return sorted(
        line.partition("ended ")[2] for line in run.stdout.splitlines() if "ended" in line
    )


# spec: U5.run python -m muster.run
def test_run_as_a_module(program):
    lines = started("muster.run", "--standalone", "--nproc-per-node", 2, program, "--steps", 3)
    assert lines == [f"{rank} 2.0 ['--steps', '3']" for rank in range(2)]


# spec: U5.launch python -m muster.launch
def test_launch_as_a_module(program):
    lines = started("muster.launch", "--standalone", "--nproc-per-node=2", program, "x")
    assert lines == [f"{rank} 2.0 ['--local-rank={rank}', 'x']" for rank in range(2)]


# spec: U5 what libraries call of torch.distributed.run
def test_run_for_libraries(program, capfd):
    import muster.run

    assert os.access(muster.run.command(), os.X_OK)
    parsed = muster.run.parse_args(
        ["--standalone", "--nproc-per-node", "1", "--redirects", "0", str(program), "--x"]
    )
    muster.run.run(parsed)
    assert capfd.readouterr().out.count("['--x']") == 1
    with pytest.raises(SystemExit):
        muster.run.main(["--standalone", str(program.with_name("absent.py"))])
    with pytest.raises(AttributeError, match="nothing"):
        muster.run.nothing  # noqa: B018


def trained(rank_given):
    import torch

    dist.init_process_group()
    x = torch.tensor([float(rank_given)])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


# spec: U5 elastic_launch: workers of torch's agent meet by muster
def test_functions_are_launched():
    from muster.run import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    assert elastic_launch(config, trained)(4) == {0: 8.0, 1: 8.0}
