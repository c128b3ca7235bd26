# SPDX-License-Identifier: BSD-3-Clause
"""A program for tools/check_types: what it calls has the types that it says."""

import datetime

import torch

import muster as dist
from muster.options import AllreduceOptions, PreHookArgs


class Kept(dist.Store):
    def set(self, key: str, value: str | bytes) -> None: ...


def main(rank: int, size: int) -> float:
    store: dist.Store = dist.PrefixStore("p", dist.HashStore())
    dist.init_process_group(store=store, rank=rank, world_size=size)
    x = torch.ones(2)
    work = dist.all_reduce(x, dist.ReduceOp.SUM, async_op=True)
    assert work is not None
    ended: bool = work.wait(datetime.timedelta(seconds=5))
    group: dist.ProcessGroup = dist.new_group([0, 1])
    group.allreduce([x], AllreduceOptions(reduceOp=dist.ReduceOp.MAX)).wait()

    def before(call: PreHookArgs) -> None:
        print(call.name, call.root)

    group.register_pre_hook(1, before)
    names: list[str] = [group.group_name, group.name(), dist.get_backend(group)]
    where: torch.device | None = group.bound_device_id
    found: dist.Store = group.get_group_store()
    try:
        dist.barrier(group)
    except dist.DistBackendError as error:
        ranks: list[int] = list(error.ranks)
        print(error.code, ranks)
    factor: float = dist.ReduceOp.PREMUL_SUM.factor
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    print(ended, names, where, found, objects)
    return factor
