# SPDX-License-Identifier: BSD-3-Clause
"""The program of mpi_test.py and ucc_test.py on each rank."""

import datetime
import os
import sys
import tempfile

import torch

import muster as dist


def check_collectives(me, n):
    def ones(value=1.0):
        return torch.full((4,), float(value))

    x = ones(me)
    dist.broadcast(x, 1)
    assert x.eq(1).all()
    x = ones(me + 1)
    dist.all_reduce(x)
    assert x.eq(3).all()
    x = ones(me + 1)
    dist.reduce(x, 0)
    assert x.eq(3 if me == 0 else me + 1).all()
    parts = [torch.empty(4), torch.empty(4)]
    dist.all_gather(parts, ones(me))
    assert parts[1].eq(1).all()
    uneven = [torch.empty(3), torch.empty(1)]
    dist.all_gather(uneven, torch.full((3 - 2 * me,), float(me)))
    assert uneven[0].eq(0).all() and uneven[1].eq(1).all()
    dist.gather(ones(me), parts if me == 1 else None, dst=1)
    assert me == 0 or parts[0].eq(0).all()
    x = torch.empty(4)
    dist.scatter(x, [ones(5), ones(6)] if me == 0 else None, src=0)
    assert x.eq(5 + me).all()
    dist.reduce_scatter(x, [ones(), ones(2)])
    assert x.eq(2 * (me + 1)).all()
    dist.all_to_all(parts, [ones(me), ones(me + 1)])
    assert parts[1].eq(1 + me).all()
    whole = torch.empty(8)
    dist.all_gather_into_tensor(whole, ones(me))
    assert whole[4:].eq(1).all()
    out = torch.empty(2 if me == 0 else 4)
    dist.all_to_all_single(out, torch.full((3,), float(me)), [1 + me, 1 + me], [1, 2])
    assert out.sum() == (1 if me == 0 else 2)
    dist.barrier()


def check_rest(me, n, backend):
    # Tensors that are not dense, 16-bit floats, bools and complex numbers.
    x = torch.full((4, 4), float(me + 1)).t()[::2]
    dist.all_reduce(x)
    assert x.eq(3).all()
    for dtype in (torch.float16, torch.bfloat16, torch.bool, torch.complex64, torch.int8):
        x = torch.ones(5, dtype=dtype)
        dist.all_reduce(x)
        assert x.eq(torch.ones(5, dtype=dtype) if dtype == torch.bool else 2).all()
    x = torch.full((3,), float(me))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.eq(0.5).all()
    # Asynchronous calls and futures.
    tensors = [torch.full((8,), float(me + i)) for i in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert works[9].get_future().wait()[0].eq(19).all()
    for i, work in enumerate(works):
        work.wait()
        assert tensors[i].eq(1 + 2 * i).all()
    # Objects, messages, groups.
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": 0}, {"rank": 1}]
    box = ["from 0" if me == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert box == ["from 0"]
    if me == 0:
        dist.send(torch.arange(5.0), 1)
        dist.send(torch.arange(50000.0), 1, tag=3)
    else:
        x = torch.empty(5)
        assert dist.recv(x) == 0 and x[4] == 4
        x = torch.empty(50000)
        dist.recv(x, 0, tag=3)
        assert x[-1] == 49999
    ops = [
        dist.P2POp(dist.isend, torch.full((3,), float(me)), 1 - me),
        dist.P2POp(dist.irecv, x := torch.empty(3), 1 - me),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert x.eq(1 - me).all()
    group = dist.new_group([1])
    if me == 1:
        assert dist.get_backend(group) == backend
        dist.all_reduce(torch.ones(1), group=group)
    dist.monitored_barrier(wait_all_ranks=True)
    mixed = dist.new_group(backend=f"cpu:{backend},cuda:native")
    x = torch.ones(2)
    dist.all_reduce(x, group=mixed)
    assert x.eq(2).all()


def operations(backend="mpi"):
    for _ in range(2):  # init after destroy works
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
        assert dist.is_backend_available(backend) and dist.get_backend() == backend
        me, n = dist.get_rank(), dist.get_world_size()
        assert n == 2
        check_collectives(me, n)
        check_rest(me, n, backend)
        dist.destroy_process_group()
    print("all is well", flush=True)


def devices():
    """An accelerator's tensors travel through the host's memory, or are refused by name."""
    dist.init_process_group("mpi", timeout=datetime.timedelta(seconds=60))
    me, ends = dist.get_rank(), set()
    for call in (dist.all_reduce, lambda x: dist.broadcast(x, 1)):
        x = torch.full((4,), me + 1.0).to("deferred:0")
        try:
            call(x)
        except dist.DistBackendError as error:
            assert "mpi" in str(error) and "deferred" in str(error), error
            ends.add("refused")
        else:
            assert x.cpu().eq(3 if call is dist.all_reduce else 2).all()
            ends.add("staged")
    dist.all_reduce(torch.ones(1))  # the group can still be used
    dist.destroy_process_group()
    assert len(ends) == 1, ends
    print("all were", *ends, flush=True)


def refused():
    """Two ranks of a job whose processes MPI knows nothing of."""
    path = tempfile.mktemp()
    child = os.fork()
    rank = 1 if child == 0 else 0
    try:
        dist.init_process_group(
            "mpi", init_method="file://" + path, rank=rank, world_size=2,
            timeout=datetime.timedelta(seconds=60),
        )  # fmt: skip
    except dist.DistBackendError as error:
        assert "not processes of one MPI job" in str(error), error
        assert "mpirun" in str(error), error
        right = True
    else:
        right = False
    if child == 0:
        os._exit(0 if right else 1)
    assert right and os.waitpid(child, 0)[1] == 0


def missing():
    assert not dist.is_mpi_available()
    try:
        dist.init_process_group("mpi")
    except dist.DistBackendError as error:
        assert "'mpi'" in str(error) and "/no/such/libmpi.so" in str(error), error
    else:
        raise AssertionError("it was found")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
