"""Programs of torch's documents with only their import changed: what they print is what the documents print."""

import os
import textwrap

import pytest
import torch

import muster as dist
import muster.torch
from ranks import meeting_file, run_ranks

# The guide's programs for four ranks, as they stand there.
GUIDE = {
    "group": """
        group = dist.new_group([0, 1])
        tensor = torch.tensor([1.])
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        print('Rank ', rank, ' has data ', tensor)
        """,
    "send": """
        tensor = torch.tensor([0.])
        if rank == 0:
            tensor += 1
            # rank 0 sends the tensor to rank 1
            dist.send(tensor=tensor, dst=1)
        elif rank == 1:
            # rank 1 receives tensor from rank 0
            dist.recv(tensor=tensor, src=0)
        print('Rank ', rank, ' has data ', tensor)
        """,
    "isend": """
        tensor = torch.tensor([0.])
        if rank == 0:
            tensor += 1
            # rank 0 sends the tensor to rank 1
            req = dist.isend(tensor=tensor, dst=1)
            print('Rank 0 started sending')
        elif rank == 1:
            # rank 1 receives tensor from rank 0
            req = dist.irecv(tensor=tensor, src=0)
            print('Rank 1 started receiving')
        if rank == 0 or rank == 1:
            req.wait()
        print('Rank ', rank, ' has data ', tensor)
        """,
    "broadcast": """
        if rank == 0:
            tensor = torch.tensor([1.])
        else:
            tensor = torch.tensor([0.])
        dist.broadcast(tensor, 0)
        print('Rank ', rank, ' has data ', tensor)
        """,
    "reduce": """
        tensor = torch.tensor([rank], dtype=torch.float32)
        dist.reduce(tensor, 0, op=dist.ReduceOp.SUM)
        print('Rank ', rank, ' has data ', tensor)
        """,
    "all_reduce": """
        tensor = torch.tensor([rank], dtype=torch.float32)
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        print('Rank ', rank, ' has data ', tensor)
        """,
    "gather": """
        tensor = torch.tensor([rank], dtype=torch.float32)
        gather_list = [torch.zeros(1) for _ in range(4)] if rank == 0 else []
        dist.gather(tensor, gather_list=gather_list, dst=0)
        print('Rank ', rank, ' has data ', tensor)
        print('Rank ', rank, ' has list ', gather_list)
        """,
    "all_gather": """
        tensor = torch.tensor([rank], dtype=torch.float32)
        tensor_list = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(tensor_list, tensor)
        print('Rank ', rank, ' has data ', tensor)
        print('Rank ', rank, ' has list ', tensor_list)
        """,
    "all_to_all": """
        input_tensor_list = [torch.tensor([rank * size + i], dtype=torch.float32) for i in range(size)]
        output_tensor_list = [torch.zeros(1) for _ in range(4)]
        dist.all_to_all(output_tensor_list=output_tensor_list, input_tensor_list=input_tensor_list)
        print('Rank ', rank, ' has input list ', input_tensor_list)
        print('Rank ', rank, ' has output list ', output_tensor_list)
        """,
    "scatter": """
        tensor = torch.zeros(1)
        scatter_list = [torch.tensor([i], dtype=torch.float32) for i in range(size)] if rank == 0 else []
        dist.scatter(tensor, scatter_list=scatter_list)
        print('Rank ', rank, ' has list ', scatter_list)
        print('Rank ', rank, ' has data ', tensor)
        """,
}


def each(what, *values):
    return [f"Rank  {rank}  has {what}  {value}" for rank, value in enumerate(values)]


ALL = "[tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]"
NUMBERS = [f"tensor([{rank}.])" for rank in range(4)]
PRINTED = {
    "group": each("data", "tensor([2.])", "tensor([2.])", "tensor([1.])", "tensor([1.])"),
    "send": each("data", "tensor([1.])", "tensor([1.])", "tensor([0.])", "tensor([0.])"),
    "isend": ["Rank 0 started sending", "Rank 1 started receiving"]
    + each("data", "tensor([1.])", "tensor([1.])", "tensor([0.])", "tensor([0.])"),
    "broadcast": each("data", *["tensor([1.])"] * 4),
    # The documents show a ring's intermediate sums off dst; here the tensors stay as they were.
    "reduce": each("data", "tensor([6.])", *NUMBERS[1:]),
    "all_reduce": each("data", *["tensor([6.])"] * 4),
    "gather": each("data", *NUMBERS) + each("list", ALL, "[]", "[]", "[]"),
    "all_gather": each("data", *NUMBERS) + each("list", *[ALL] * 4),
    # The documents have an error here: Gloo had no all_to_all.
    "all_to_all": each("input list", *("[" + ", ".join(f"tensor([{4 * r + i}.])" for i in range(4)) + "]" for r in range(4)))
    + each("output list", *("[" + ", ".join(f"tensor([{4 * i + r}.])" for i in range(4)) + "]" for r in range(4))),
    "scatter": each("data", *NUMBERS) + each("list", ALL, "[]", "[]", "[]"),
}


# spec: P1 the guide's programs for four ranks
@pytest.mark.parametrize("name", GUIDE)
def test_guide(name):
    store, printed = dist.HashStore(), []
    program = compile(textwrap.dedent(GUIDE[name]), name, "exec")

    def run(rank, size):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        names = {"rank": rank, "size": size, "dist": dist, "torch": torch}
        exec(program, names | {"print": lambda *words: printed.append(" ".join(map(str, words)))})
        dist.destroy_process_group()

    dist.spawn(run, args=(4,), nprocs=4, threads=True)
    assert sorted(printed) == sorted(PRINTED[name])


# spec: P1 int64 and complex examples of the collectives for two ranks
def test_examples_for_two_ranks():
    store = dist.HashStore()

    def run(rank):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        assert str(tensor) == "tensor([4, 6])"
        tensor = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.cfloat) + 2 * rank * (1 + 1j)
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        assert str(tensor) == "tensor([4.+4.j, 6.+6.j])"
        tensor_list = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(tensor_list, torch.arange(2, dtype=torch.int64) + 1 + 2 * rank)
        assert str(tensor_list) == "[tensor([1, 2]), tensor([3, 4])]"
        tensor_in = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
        tensor_out = torch.zeros(4, dtype=torch.int64)
        dist.all_gather_into_tensor(tensor_out, tensor_in)
        assert str(tensor_out) == "tensor([1, 2, 3, 4])"
        tensor_out = torch.zeros(2, dtype=torch.int64)
        dist.reduce_scatter_tensor(tensor_out, torch.arange(4, dtype=torch.int64))
        assert str(tensor_out) == ("tensor([0, 2])", "tensor([4, 6])")[rank]
        send_tensor = torch.arange(2, dtype=torch.float32) + 2 * rank
        recv_tensor = torch.randn(2, dtype=torch.float32)
        send_op = dist.P2POp(dist.isend, send_tensor, (rank + 1) % 2)
        recv_op = dist.P2POp(dist.irecv, recv_tensor, (rank - 1 + 2) % 2)
        for req in dist.batch_isend_irecv([send_op, recv_op]):
            req.wait()
        assert str(recv_tensor) == ("tensor([2., 3.])", "tensor([0., 1.])")[rank]
        dist.destroy_process_group()

    dist.spawn(run, nprocs=2, threads=True)


# spec: P1 all_to_all_single's uneven example
def test_uneven_all_to_all():
    store = dist.HashStore()
    inputs = [range(6), range(10, 19), range(20, 25), range(30, 37)]
    input_splits = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
    output_splits = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]
    printed = [
        [0, 1, 10, 11, 12, 20, 21, 30, 31],
        [2, 3, 13, 14, 22, 32, 33],
        [4, 15, 16, 23, 34, 35],
        [5, 17, 18, 24, 36],
    ]

    def run(rank):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        output = torch.empty(sum(output_splits[rank]), dtype=torch.int64)
        dist.all_to_all_single(output, torch.tensor(list(inputs[rank])), output_splits[rank], input_splits[rank])
        assert output.tolist() == printed[rank]
        dist.destroy_process_group()

    dist.spawn(run, nprocs=4, threads=True)


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = torch.nn.Linear(10, 10)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


# spec: P1 demo_basic and demo_checkpoint on stock torch with its gloo replaced
def test_demo_basic_and_checkpoint():
    path = meeting_file()
    name = meeting_file()

    def demo(rank):
        import torch.distributed as stock
        from torch.nn.parallel import DistributedDataParallel as DDP

        muster.torch.replace_gloo()
        stock.init_process_group("gloo", init_method="file://" + name, rank=rank, world_size=2)
        ddp_model = DDP(ToyModel())
        if rank == 0:
            torch.save(ddp_model.state_dict(), path)
        stock.barrier()
        ddp_model.load_state_dict(torch.load(path))
        loss_fn = torch.nn.MSELoss()
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        loss_fn(outputs, labels).backward()
        optimizer.step()
        if rank == 0:
            os.remove(path)
        stock.destroy_process_group()
        return [parameter.tolist() for parameter in ddp_model.parameters()]

    first, second = run_ranks(2, demo)
    assert first == second
