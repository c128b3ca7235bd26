# SPDX-License-Identifier: BSD-3-Clause
"""One rank of bench/replica_steps.py: examples/replicas/replicas.py, with two methods more, by
stock torch on Gloo.
"""

import pathlib
import sys

import torch
import torch.distributed as stock
from stock_diloco import StockDiLoCo

import muster as dist
from muster import local_sgd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "replicas"))
import replicas  # noqa: E402


def with_stock_ddp(net, optimizer, options):
    return torch.nn.parallel.DistributedDataParallel(net), lambda: None


def with_stock_diloco(net, optimizer, options):
    diloco = StockDiLoCo(local_sgd.fragments_of(net, 1), options.sync_every)
    hook = optimizer.register_step_post_hook(lambda *_: diloco.step())
    return net, hook.remove


def main():
    stock_methods = {"gloo_ddp": with_stock_ddp, "gloo_diloco": with_stock_diloco}
    replicas.METHODS |= stock_methods
    parser = replicas.make_parser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = {"rank": options.rank, "world_size": options.ranks}
    dist.init_process_group(init_method=f"file://{options.folder}/muster", **place)
    if options.method in stock_methods:
        stock.init_process_group("gloo", init_method=f"file://{options.folder}/gloo", **place)
    replicas.run(options, parser)
    if stock.is_initialized():
        stock.destroy_process_group()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
