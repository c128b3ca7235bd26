# SPDX-License-Identifier: BSD-3-Clause
"""Times all_reduce with and without compression.

    muster run --nproc-per-node 1 bench/compressed_all_reduce.py [MIB] [CALLS]

on each host; the links are what they are. Prints the median of CALLS calls (default 9) on MIB
(default 64) of float32, and how many times as fast as without compression that is. Within one host
ranks share memory and nothing is compressed, unless MUSTER_COMPRESS_WITHIN_HOST=1 is set.
"""

import statistics
import sys
import time

import torch

import muster as dist


def median_ms(tensor, calls, compression):
    times = []
    for _ in range(calls + 1):  # the first one is not counted
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor, compression=compression)
        times.append((time.perf_counter() - start) * 1000)
        tensor.mul_(1 / dist.get_world_size())
    return statistics.median(times[1:])


def main():
    mib, calls = (int(each) for each in (sys.argv[1:] + ["64", "9"][len(sys.argv) - 1 :])[:2])
    torch.set_num_threads(1)
    dist.init_process_group()
    tensor = torch.randn(mib * 2**18)
    plain = median_ms(tensor, calls, None)
    for compression in (None, "bf16", "int8", "int4"):
        ms = plain if compression is None else median_ms(tensor, calls, compression)
        if dist.get_rank() == 0:
            print(f"{compression or 'float32':8} {ms:8.1f} ms  {plain / ms:5.2f} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
