# SPDX-License-Identifier: BSD-3-Clause
"""The ways to meet of the reference, the guide and the older reference: four ranks by each."""

import argparse
import os

import muster as dist


def meet(how, **options):
    dist.init_process_group("gloo", **options)
    dist.barrier()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    if dist.get_rank() == 0:
        print(f"{how}: {ranks}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", 0)))
    parser.add_argument("--address", required=True, help="host:port of rank 0")
    parser.add_argument("--file", required=True, help="a file that all ranks see")
    parser.add_argument("--multicast", help="an address of multicast and a port")
    args = parser.parse_args()

    # Use address of one of the machines
    meet("tcp", init_method="tcp://" + args.address, rank=args.rank, world_size=4)

    # rank should always be specified
    meet("file", init_method="file://" + args.file, world_size=4, rank=args.rank)

    host, _, port = args.address.rpartition(":")
    os.environ["MASTER_ADDR"] = host
    os.environ["MASTER_PORT"] = port
    meet("env", rank=args.rank, world_size=4)

    # Rank will be assigned automatically if unspecified
    meet("file, ranks assigned", init_method="file://" + args.file, world_size=4, group_name="jobs")

    # or a multicast address - rank will be assigned automatically if unspecified
    if args.multicast:
        meet("multicast", init_method="tcp://" + args.multicast, world_size=4)
