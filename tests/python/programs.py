# SPDX-License-Identifier: BSD-3-Clause
"""Writes programs for torch.distributed that use a part of its documented calls, drawn by a seed.

A program's ranks call `main(rank, size, folder)`, which gives what the calls gave: numbers, text,
lists. Its import lines are the only ones that name torch.distributed.
"""

import random
import textwrap

IMPORTS = """
import datetime
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState, post_localSGD_hook)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.nn import functional
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
"""

MAIN = """
def main(rank, size, folder):
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    out = {}
    for part in PARTS:
        out[part.__name__] = part(rank, size, folder)
    dist.destroy_process_group()
    return out


def raised(function):
    try:
        function()
    except Exception:
        return True
    return False
"""

# By the call that each is about: the body of a function of rank, size and folder.
PARTS = {
    "is_available": "return dist.is_available(), dist.is_initialized()",
    "is_gloo_available": "return dist.is_gloo_available(), dist.is_backend_available('gloo')",
    "Backend": "return dist.Backend('GLOO'), dist.Backend.GLOO, raised(lambda: dist.Backend(3))",
    "get_backend": "return dist.get_backend(), dist.get_backend(dist.group.WORLD)",
    "get_rank": "return dist.get_rank(), dist.get_rank(dist.group.WORLD), dist.get_world_size()",
    "is_torchelastic_launched": "return dist.is_torchelastic_launched()",
    "get_node_local_rank": "return dist.get_node_local_rank(fallback_rank=rank)",
    "get_default_backend_for_device": (
        "return dist.get_default_backend_for_device('cpu') is not None"
    ),
    "supports_complex": """
        return (dist.supports_complex(dist.ReduceOp.SUM),
                dist.supports_complex(dist.ReduceOp.MAX))""",
    "group_ranks": """
        ranks = [size - 1, 0]
        group = dist.new_group(ranks)
        if rank not in ranks:
            return dist.get_rank(group), group == dist.GroupMember.NON_GROUP_MEMBER
        return (
            dist.get_process_group_ranks(group), dist.get_group_rank(group, rank),
            dist.get_global_rank(group, 0), group.rank(), group.size(),
        )""",
    "new_group": """
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=30), group_desc="pair")
        x = torch.full((3,), rank + 1.0)
        if rank < 2:
            dist.all_reduce(x, group=group)
            return x.tolist(), group.group_desc
        return x.tolist()""",
    "new_group_unsorted": """
        group = dist.new_group([1, 0], sort_ranks=False)
        if rank > 1:
            return None
        x = torch.tensor([rank])
        dist.broadcast(x, group_src=0, group=group)
        return x.item(), dist.get_rank(group)""",
    "new_subgroups_by_enumeration": """
        mine, all_of_them = dist.new_subgroups_by_enumeration([[0, 2], [1]])
        return dist.get_process_group_ranks(mine), len(all_of_them)""",
    "new_subgroups": """
        mine, all_of_them = dist.new_subgroups(group_size=1)
        return dist.get_process_group_ranks(mine), len(all_of_them)""",
    "set_timeout": """
        group = dist.new_group()
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=20), group)
        dist.barrier(group)
        return True""",
    "FileStore": """
        store = dist.FileStore(folder + "/store", size)
        store.set(f"key{rank}", f"value{rank}")
        store.wait([f"key{each}" for each in range(size)])
        return store.get(f"key{(rank + 1) % size}"), store.add("count", rank) >= 0""",
    "HashStore": """
        store = dist.HashStore()
        store.set("a", "1")
        return (store.get("a"), store.add("n", 3), store.num_keys(), store.delete_key("a"),
                store.check(["a"]))""",
    "PrefixStore": """
        below = dist.HashStore()
        store = dist.PrefixStore("p", below)
        store.set("a", "1")
        return store.get("a"), below.check(["p/a"]), store.underlying_store.get("p/a")""",
    "compare_set": """
        store = dist.HashStore()
        first = store.compare_set("k", "", "one")
        second = store.compare_set("k", "no", "two")
        third = store.compare_set("k", "one", "three")
        return first, second, third""",
    "TCPStore": """
        port = [None]
        if rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            port = [server.port]
        dist.broadcast_object_list(port, src=0)
        store = server if rank == 0 else dist.TCPStore("127.0.0.1", port[0], is_master=False)
        store.set(f"r{rank}", str(rank))
        values = store.multi_get([f"r{each}" for each in range(size)])
        dist.barrier()
        return values, store.host""",
    "Store_timeout": """
        store = dist.HashStore()
        store.set_timeout(datetime.timedelta(milliseconds=50))
        return raised(lambda: store.get("absent")), store.timeout.total_seconds()""",
    "store_queue": """
        store = dist.HashStore()
        store.queue_push("q", "x")
        store.append("log", "a")
        store.append("log", "b")
        return store.queue_len("q"), store.queue_pop("q"), store.get("log")""",
    "send_recv": """
        x = torch.arange(4) + rank
        y = torch.zeros(4, dtype=torch.int64)
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            return dist.recv(y, 0), y.tolist()""",
    "recv_any": """
        y = torch.zeros(2)
        if rank == 0:
            dist.send(torch.ones(2), dst=size - 1, tag=4)
        elif rank == size - 1:
            return dist.recv(y, tag=4), y.tolist()""",
    "isend_irecv": """
        y = torch.zeros(3)
        works = [
            dist.isend(torch.full((3,), float(rank)), (rank + 1) % size),
            dist.irecv(y, (rank - 1) % size),
        ]
        for work in works:
            work.wait()
        return y.tolist(), [work.is_completed() for work in works]""",
    "batch_isend_irecv": """
        x, y = torch.full((2,), float(rank)), torch.zeros(2)
        ops = [
            dist.P2POp(dist.isend, x, (rank + 1) % size),
            dist.P2POp(dist.irecv, y, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return y.tolist()""",
    "send_object_list": """
        objects = [rank, "text", {"a": torch.ones(1)}] if rank == 0 else [None] * 3
        if rank == 0:
            dist.send_object_list(objects, dst=1)
        elif rank == 1:
            dist.recv_object_list(objects, src=0)
            return objects[0], objects[1], objects[2]["a"].tolist()""",
    "broadcast": """
        x = torch.full((2, 2), float(rank))
        dist.broadcast(x, src=1)
        return x.tolist()""",
    "broadcast_object_list": """
        objects = ["a", 1, {"x": (2, 3)}] if rank == 0 else [None, None, None]
        dist.broadcast_object_list(objects, src=0)
        return objects""",
    "all_reduce": """
        x = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
        dist.all_reduce(x, op=dist.ReduceOp.SUM)
        return x.tolist()""",
    "all_reduce_ops": """
        results = []
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            x = torch.tensor([rank + 1.0, -rank])
            dist.all_reduce(x, op)
            results.append(x.tolist())
        for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            x = torch.tensor([rank + 5])
            dist.all_reduce(x, op)
            results.append(x.tolist())
        return results""",
    "all_reduce_complex": """
        x = torch.tensor([1 + 1j, 2 + 2j]) + 2 * rank * (1 + 1j)
        dist.all_reduce(x)
        return torch.view_as_real(x).tolist()""",
    "all_reduce_async": """
        x = torch.full((5,), rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        ended = work.wait()
        return ended, x.tolist(), work.is_success(), work.result()[0].tolist()""",
    "get_future": """
        x = torch.full((3,), rank + 1.0)
        future = dist.all_reduce(x, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].sum().item()).wait()""",
    "reduce": """
        x = torch.full((3,), rank + 1.0)
        dist.reduce(x, dst=1)
        return x.tolist() if rank == 1 else None""",
    "reduce_op": """
        x = torch.tensor([rank + 1])
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        same = dist.ReduceOp(dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        return x.item(), same, dist.ReduceOp.SUM == dist.ReduceOp.MAX""",
    "all_gather": """
        parts = [torch.zeros(2, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(parts, torch.arange(2) + 1 + 2 * rank)
        return [each.tolist() for each in parts]""",
    "all_gather_into_tensor": """
        x = torch.arange(2) + 1 + 2 * rank
        joined = torch.zeros(2 * size, dtype=torch.int64)
        dist.all_gather_into_tensor(joined, x)
        return joined.tolist()""",
    "all_gather_object": """
        found = [None] * size
        dist.all_gather_object(found, {"rank": rank, "list": [rank] * rank})
        return found""",
    "gather": """
        parts = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
        dist.gather(torch.full((2,), rank + 1.0), parts, dst=0)
        return parts and [each.tolist() for each in parts]""",
    "gather_object": """
        found = [None] * size if rank == 1 else None
        dist.gather_object(("from", rank), found, dst=1)
        return found""",
    "scatter": """
        x = torch.zeros(2)
        parts = [torch.full((2,), each + 1.0) for each in range(size)] if rank == 0 else None
        dist.scatter(x, parts, src=0)
        return x.tolist()""",
    "scatter_object_list": """
        mine = [None]
        given = [f"for {each}" for each in range(size)] if rank == 0 else [None] * size
        dist.scatter_object_list(mine, given, src=0)
        return mine""",
    "reduce_scatter": """
        x = torch.zeros(2)
        dist.reduce_scatter(x, [torch.full((2,), float(rank + each)) for each in range(size)])
        return x.tolist()""",
    "reduce_scatter_tensor": """
        x = torch.zeros(2, dtype=torch.int64)
        dist.reduce_scatter_tensor(x, torch.arange(2 * size))
        return x.tolist()""",
    "all_to_all_single": """
        x = torch.zeros(size, dtype=torch.int64)
        dist.all_to_all_single(x, torch.arange(size) + rank * size)
        return x.tolist()""",
    "all_to_all_splits": """
        sizes = [each + 1 for each in range(size)]
        x = torch.zeros(size * (rank + 1), dtype=torch.int64)
        dist.all_to_all_single(x, torch.arange(sum(sizes)) + 10 * rank, [rank + 1] * size, sizes)
        return x.tolist()""",
    "all_to_all": """
        found = [torch.zeros(1) for _ in range(size)]
        dist.all_to_all(found, [torch.tensor([10.0 * rank + each]) for each in range(size)])
        return [each.item() for each in found]""",
    "barrier": """
        dist.barrier()
        return dist.barrier(async_op=True).wait()""",
    "monitored_barrier": "return dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))",
    "sparse_all_reduce": """
        x = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (size,))
        dist.all_reduce(x)
        return x.to_dense().tolist()""",
    "noncontiguous": """
        x = (torch.arange(6.0).view(2, 3) + rank).t()
        y = x.contiguous()
        dist.all_reduce(y)
        return y.tolist()""",
    "bfloat16": """
        x = torch.full((3,), rank + 0.5, dtype=torch.bfloat16)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.float().tolist()""",
    "errors": """
        wrong = [
            lambda: dist.send(torch.ones(1), rank),
            lambda: dist.new_group([size + 7]),
            lambda: dist.init_process_group("gloo"),
            lambda: dist.all_gather("not", "tensors"),
        ]
        return [raised(each) for each in wrong]""",
    "debug_level": """
        before = dist.get_debug_level() == dist.DebugLevel.OFF
        dist.set_debug_level(dist.DebugLevel.INFO)
        name = dist.get_debug_level().name
        dist.set_debug_level(dist.DebugLevel.OFF)
        return before, name""",
    "init_device_mesh": """
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",))
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=mesh.get_group())
        return (x.item(), mesh.get_local_rank(), mesh.size(), mesh.mesh_dim_names,
                mesh.get_coordinate())""",
    "DeviceMesh": """
        mesh = DeviceMesh("cpu", list(range(size)))
        return mesh.mesh.tolist(), mesh.ndim, mesh.device_type, mesh.get_rank()""",
    "group_methods": """
        group = _get_default_group()
        x = torch.tensor([rank + 1.0])
        group.allreduce([x]).wait()
        y = torch.tensor([float(rank)])
        group.broadcast(y, 1).wait()
        parts = [[torch.zeros(1) for _ in range(size)]]
        group.allgather(parts, [x]).wait()
        group.barrier().wait()
        return (x.item(), y.item(), [each.item() for each in parts[0]], group.rank(),
                group.size())""",
    "group_options": """
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        x = torch.tensor([float(rank)])
        dist.group.WORLD.allreduce([x], options).wait()
        root = dist.BroadcastOptions()
        root.rootRank, root.rootTensor = 1, 0
        y = torch.tensor([float(rank)])
        dist.group.WORLD.broadcast([y], root).wait()
        return x.item(), y.item()""",
    "group_messages": """
        group, x = dist.group.WORLD, torch.zeros(2)
        if rank == 0:
            group.send([torch.ones(2)], 1, 3).wait()
        elif rank == 1:
            group.recv([x], 0, 3).wait()
        return x.tolist()""",
    "group_rooted": """
        group = dist.group.WORLD
        mine = torch.zeros(1)
        given = [[torch.tensor([float(each)]) for each in range(size)]] if rank == 0 else []
        options = dist.ScatterOptions()
        options.rootRank = 0
        group.scatter([mine], given, options).wait()
        found = [[torch.zeros(1) for _ in range(size)]] if rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        group.gather(found, [mine + 1], options).wait()
        return mine.item(), [each.item() for each in found[0]] if found else []""",
    "register_rendezvous_handler": """
        def handler(url, **kwargs):
            yield dist.FileStore(folder + "/by_handler", size), rank, size
        scheme = "face" + folder.rpartition("/")[2]
        if not raised(lambda: dist.register_rendezvous_handler(scheme, handler)):
            store, got_rank, got_size = next(dist.rendezvous(scheme + "://here", rank, size))
            store.add("n", 1)
            return got_rank, got_size""",
    "functional_collectives": """
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        functional.all_reduce(x * 2).sum().backward()
        y = torch.cat(list(functional.all_gather(x.detach())))
        return x.grad.tolist(), y.tolist()""",
    "results_of_functions": """
        x, group = torch.tensor([rank + 1.0, 4.0, 5.0]), dist.group.WORLD
        total = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))
        parts = funcol.wait_tensor(funcol.all_gather_single(x, 0, group))
        mine = funcol.wait_tensor(funcol.reduce_scatter_single(x, "sum", 0, group))
        turned = funcol.wait_tensor(funcol.all_to_all_single(x, None, None, group))
        return total.tolist(), parts.tolist(), mine.tolist(), turned.tolist()""",
    "PeriodicModelAverager": """
        layer = torch.nn.Linear(2, 1)
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        seen = []
        for step in range(4):
            layer(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                layer.weight.fill_(rank + step)
            averager.average_parameters(layer.parameters())
            seen.append(layer.weight[0, 0].item())
        return seen, averager.step""",
    "PostLocalSGDOptimizer": """
        torch.manual_seed(5)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        alone, _ = dist.new_subgroups(group_size=1)
        model.register_comm_hook(PostLocalSGDState(None, alone, 1), post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            optimizer.step()
        return model.module.weight.tolist(), optimizer.state_dict()["step"]""",
    "DistributedSampler": """
        sampler = DistributedSampler(list(range(10)), shuffle=True, seed=3)
        sampler.set_epoch(2)
        return list(sampler), len(sampler)""",
    "DistributedDataParallel": """
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), rank + step + 1.0)).square().mean().backward()
            optimizer.step()
        return model.module.weight.tolist()""",
    "no_sync": """
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        with model.no_sync():
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
        model(torch.full((1, 2), 2.0 * rank)).sum().backward()
        return model.module.weight.grad.tolist()""",
    "register_comm_hook": """
        torch.manual_seed(2)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
        return model.module.weight.grad.tolist()""",
    "ZeroRedundancyOptimizer": """
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        model = DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1,
                                            momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            optimizer.step()
        return [each.tolist() for each in model.parameters()]""",
    "Join": """
        torch.manual_seed(4)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        with Join([model]):
            for step in range(rank + 1):
                model(torch.full((1, 2), 1.0 + step)).sum().backward()
        return True""",
}


def names_of(seed):
    """Those that the program of that seed is about: a third."""
    return random.Random(seed).sample(sorted(PARTS), len(PARTS) // 3)


def program(seed):
    """Its text."""
    names = names_of(seed)
    functions = []
    for name in names:
        body = textwrap.indent(textwrap.dedent(PARTS[name]).strip("\n"), "    ")
        functions.append(f"def {name}_part(rank, size, folder):\n{body}\n")
    listed = ", ".join(f"{name}_part" for name in names)
    return "\n\n".join([IMPORTS.strip(), MAIN.strip(), *functions, f"PARTS = [{listed}]\n"])


def moved(text):
    """The program for muster: its imports changed, and nothing else."""
    lines = []
    for line in text.splitlines():
        if line.startswith(("import torch.", "from torch.")):
            line = line.replace("torch.distributed as", "muster as").replace("torch.", "muster.")
        lines.append(line)
    return "\n".join(lines)
