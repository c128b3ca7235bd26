# SPDX-License-Identifier: BSD-3-Clause
"""`muster.rpc`: its options, names and signatures, and processes without the secret."""

import inspect
import os
import pickle
import socket

import torch
from ranks import LIMIT_S, fork, meeting_file, reserve_port, run_ranks
from rpc_workers import Server, raised, same, who

import muster as dist

rpc = dist.rpc


# ---- options


# spec: N5 options, set_device_map cumulative, set_devices in Python, N13 names, keyword-only, keys
# of maps
def test_options():
    assert rpc.TensorPipeRpcBackendOptions is rpc.RpcBackendOptions
    options = rpc.RpcBackendOptions()
    assert (options.num_worker_threads, options.rpc_timeout, options.init_method) == (
        16,
        60,
        "env://",
    )
    assert options.device_maps == {} and options.devices == []
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=LIMIT_S, device_maps={"worker1": {0: 1}}
    )
    options.set_device_map("worker1", {"cuda:1": torch.device("cuda", 2)})
    cuda = [torch.device("cuda", i) for i in range(3)]
    assert options.device_maps == {"worker1": {cuda[0]: cuda[1], cuda[1]: cuda[2]}}
    raised(dist.DistArgumentError, options.set_device_map, "worker1", {2: 1})
    options.set_devices([0, "cuda:1"])
    assert options.devices == cuda[:2]
    raised(dist.DistArgumentError, options.set_devices, ["cpu"])
    raised(TypeError, rpc.RpcBackendOptions, 8)
    options.rpc_timeout = 1.5
    assert options.rpc_timeout == 1.5
    assert (
        rpc.BackendType("tensorpipe") == rpc.BackendType.TENSORPIPE
        and rpc.BackendType.NATIVE.name == "NATIVE"
    )
    assert "NATIVE" in str(raised(dist.DistArgumentError, rpc.BackendType, "none"))
    raised(
        dist.DistArgumentError,
        rpc.init_rpc,
        "a",
        None,
        0,
        1,
        rpc.RpcBackendOptions(num_worker_threads=0),
    )


# spec: N10 signatures as torch's, N1 arguments of init_rpc in Python
def test_signatures():
    import torch.distributed.rpc as theirs
    from torch.distributed.optim import DistributedOptimizer

    def arguments(function):
        return [
            (each.name, each.default)
            for each in inspect.signature(function).parameters.values()
            if each.kind is not each.KEYWORD_ONLY
        ]

    for name in ("init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info"):
        mine = arguments(getattr(rpc, name))
        assert mine == arguments(getattr(theirs, name)), name
        assert len(getattr(rpc, name).__doc__.split()) > 5
    assert arguments(dist.optim.DistributedOptimizer.__init__) == arguments(
        DistributedOptimizer.__init__
    )
    for name in (
        "to_here",
        "local_value",
        "is_owner",
        "owner",
        "owner_name",
        "confirmed_by_owner",
        "backward",
        "rpc_sync",
        "rpc_async",
        "remote",
    ):
        assert hasattr(rpc.RRef, name)


# spec: N1 unique names in Python
def test_names_are_unique():
    where = "file://" + meeting_file()

    def body(rank):
        error = raised(
            dist.DistArgumentError,
            rpc.init_rpc,
            "twin",
            None,
            rank,
            2,
            rpc.RpcBackendOptions(init_method=where),
        )
        assert "ranks 0 and 1 both call themselves 'twin'" in str(error)

    run_ranks(2, body)


def test_workers_as_threads():
    where = "file://" + meeting_file()

    def body(rank):
        rpc.init_rpc(
            f"thread{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=where),
        )
        assert rpc.rpc_sync(1 - rank, who) == f"thread{1 - rank}"
        assert rpc.remote(1 - rank, Server, (rank,)).rpc_sync().add(1.0) == rank + 1
        rpc.shutdown()

    dist.spawn(body, nprocs=2, threads=True)


# ---- processes without the secret


class Mark:
    """Its pickle leaves a folder where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def listening_ports():
    """Those of this process."""
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    mine = {os.readlink(each) for each in links if os.path.islink(each)}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in open(f"/proc/net/{table}").readlines()[1:]
    ]
    return sorted(
        {
            int(line[1].rpartition(":")[2], 16)
            for line in lines
            if line[3] == "0A" and f"socket:[{line[9]}]" in mine
        }
    )


# spec: N2 a wrong secret is refused before any pickle is read
def test_outsiders_are_refused_before_anything_is_unpickled(tmp_path, monkeypatch):
    mark, address = str(tmp_path / "mark"), f"tcp://127.0.0.1:{reserve_port()}"
    monkeypatch.setenv("MUSTER_SECRET", "the secret of this job")
    ready, tried = fork.Event(), fork.Event()
    ports = fork.Array("i", 16)

    def worker(rank):
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=address, shared_memory=False),
        )
        assert rpc.rpc_sync(1 - rank, who) == f"worker{1 - rank}"
        if rank == 0:
            found = listening_ports()
            ports[: len(found)] = found
            ready.set()
        assert tried.wait(LIMIT_S)
        assert rpc.rpc_sync(1 - rank, who) == f"worker{1 - rank}"
        if rank == 1:  # from one of the job it is read: the pickle is a good one
            assert not os.path.exists(mark)
            rpc.rpc_sync(0, same, (Mark(mark),))
            assert os.path.isdir(mark)
        rpc.shutdown(timeout=LIMIT_S)

    def outsider():
        assert ready.wait(LIMIT_S)
        os.environ["MUSTER_SECRET"] = "some other job's words"
        error = raised(
            dist.DistError,
            rpc.init_rpc,
            "worker1",
            None,
            1,
            2,
            rpc.RpcBackendOptions(init_method=address),
        )
        assert "secret" in str(error)
        data = pickle.dumps((same, (Mark(mark),), {}), protocol=5)
        doors = [each for each in ports if each]
        assert doors
        for door in doors:
            # As it is, and as a message of so many bytes.
            for start in (b"", len(data).to_bytes(4, "little"), len(data).to_bytes(8, "little")):
                with socket.create_connection(("127.0.0.1", door), timeout=LIMIT_S) as connection:
                    try:
                        connection.sendall(start + data)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):
                            pass
                    except OSError:  # it has hung up
                        pass
        tried.set()

    def body(rank):
        worker(rank) if rank < 2 else outsider()

    run_ranks(3, body)
