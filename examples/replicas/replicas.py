# SPDX-License-Identifier: BSD-3-Clause
"""Trains a language model of bytes on replicas, by DDP, LocalSgd or DiLoCo:

    muster run --standalone --nproc-per-node 4 replicas.py --method diloco --compression int8

Every run of a seed prints a line of JSON: the held-out loss in nats a byte, of the mean of the
replicas' weights; the tokens, which are bytes of the text, that all replicas have learned from, and
how many a second; and with --interface, the bytes that hosts have sent there for each token. The
number of steps is rounded down to whole meetings, with DDP too.
"""

import argparse
import json
import math
import pathlib
import time

import torch
from language_model import LanguageModel, Text

import muster as dist
from muster import local_sgd
from muster.nn.parallel import DistributedDataParallel

COMPRESSIONS = ("bf16", "int8", "int4")
ALICE = pathlib.Path(__file__).resolve().parents[1] / "data" / "alice.txt"


def with_ddp(net, optimizer, options):
    """All ranks are one replica, whose gradients are averaged in every step."""
    return DistributedDataParallel(net), lambda: None


def with_local_sgd(net, optimizer, options):
    """Meets by the optimizer's steps. Within a replica of several ranks, DDP."""
    replicas = options.replicas
    names = ("replicas", "ranks")
    mesh = dist.init_device_mesh("cpu", (replicas, options.ranks // replicas), mesh_dim_names=names)
    model = net
    if replicas < options.ranks:
        model = DistributedDataParallel(net, process_group=mesh.get_group("ranks"))
    chosen = {
        "sync_every": options.sync_every,
        "compression": options.compression,
        "group": mesh.get_group("replicas"),
    }
    if options.method == "diloco":
        chosen |= {"fragments": options.fragments, "delay": options.delay, "mix": options.mix}
        meetings = local_sgd.DiLoCo(net, optimizer, **chosen)
    else:
        meetings = local_sgd.LocalSgd(net, optimizer, **chosen)
    return model, meetings.remove


#: How a net and its optimizer come to be trained by all: what is called with a batch, and what at
#: the end.
METHODS = {"ddp": with_ddp, "local_sgd": with_local_sgd, "diloco": with_local_sgd}


def bytes_sent(interface):
    """By this host. Ranks of one host count once."""
    if interface is None:
        return 0
    return int(pathlib.Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def optimizer_of(net, options, steps):
    """AdamW, and its schedule: up in a tenth of the steps, down along a cosine."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.rate, betas=(0.9, 0.99))
    warm = max(1, steps // 10)

    def factor(step):
        return min(1, (step + 1) / warm) * (1 + math.cos(math.pi * step / steps)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def held_out_loss(net, text):
    """Takes the mean over all ranks, which is each one's where all have just met."""
    with torch.no_grad():
        mean = torch.nn.utils.parameters_to_vector(net.parameters())
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.nn.utils.vector_to_parameters(mean, net.parameters())
        return net(text.held_out).item()


def train(options, seed, text):
    """The line of one run."""
    rank, ranks = dist.get_rank(), options.ranks
    torch.manual_seed(seed)
    net = LanguageModel(options.width, options.layers, options.context)
    step_tokens = ranks * options.batch * options.context
    steps = max(1, options.tokens // step_tokens // options.sync_every) * options.sync_every
    optimizer, schedule = optimizer_of(net, options, steps)
    model, end = METHODS[options.method](net, optimizer, options)
    draw = torch.Generator().manual_seed(ranks * seed + rank)
    dist.barrier()
    sent, start = bytes_sent(options.interface), time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(text.windows(options.batch, draw)).backward()
        optimizer.step()
        schedule.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    sent = torch.tensor(bytes_sent(options.interface) - sent if options.first_of_host else 0)
    dist.all_reduce(sent)
    end()
    tokens = steps * step_tokens
    return {
        "method": options.method,
        "replicas": options.replicas,
        "compression": options.compression,
        "fragments": options.fragments,
        "sync_every": options.sync_every,
        "seed": seed,
        "weights": sum(each.numel() for each in net.parameters()),
        "tokens": tokens,
        "loss": round(held_out_loss(net, text), 5),
        "bytes_per_token": round(sent.item() / tokens, 3) if options.interface else None,
        "tokens_per_s": round(tokens / seconds, 1),
    }


def numbers_of(words):
    return [int(word) for word in words.split(",")]


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=METHODS, default="diloco", help="default diloco")
    parser.add_argument("--compression", choices=COMPRESSIONS, help="in meetings; default none")
    parser.add_argument("--replicas", type=int, help="default: as many as ranks")
    parser.add_argument("--sync-every", type=int, default=50, help="steps; default 50")
    parser.add_argument("--fragments", type=int, default=1, help="of DiLoCo; default 1")
    parser.add_argument("--delay", type=int, default=0, help="of DiLoCo, in steps; default 0")
    parser.add_argument("--mix", type=float, default=0.0, help="of DiLoCo; default 0")
    parser.add_argument("--tokens", type=int, default=400_000, help="of all; default 400000")
    parser.add_argument("--batch", type=int, default=2, help="windows a rank and step; default 2")
    parser.add_argument("--context", type=int, default=64, help="bytes of a window; default 64")
    parser.add_argument("--width", type=int, default=192, help="default 192")
    parser.add_argument("--layers", type=int, default=3, help="default 3: 1.4 million weights")
    parser.add_argument("--rate", type=float, default=2e-3, help="of AdamW; default 0.002")
    parser.add_argument("--seeds", type=numbers_of, default=[1], help="a run of each; default 1")
    parser.add_argument("--text", type=pathlib.Path, default=ALICE, help="default: three chapters")
    parser.add_argument("--interface", help="whose bytes are counted: each host's by this name")
    return parser


def complete(options, parser):
    options.ranks = dist.get_world_size()
    options.first_of_host = dist.get_node_local_rank(0) == 0
    options.replicas = options.replicas or options.ranks
    if options.replicas < 1 or options.ranks % options.replicas:
        parser.error(f"{options.ranks} ranks cannot be {options.replicas} replicas of equal size")
    if options.compression and METHODS[options.method] is not with_local_sgd:
        parser.error("--compression is for local_sgd and diloco")
    if options.method != "diloco" and (options.fragments > 1 or options.delay or options.mix):
        parser.error("--fragments, --delay and --mix are for diloco")


def run(options, parser):
    """Once the ranks have met."""
    complete(options, parser)
    text = Text(options.text.read_bytes(), options.context)
    for seed in options.seeds:
        line = train(options, seed, text)
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)


def main():
    parser = make_parser()
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are the parallelism
    dist.init_process_group()
    run(options, parser)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
