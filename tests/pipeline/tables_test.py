# SPDX-License-Identifier: BSD-3-Clause
"""Our pipeline tables beside torch's: the same actions on every rank, in the same order.

tables_test.py PROGRAM      PROGRAM prints ours (print_tables_main.cc)

torch writes idle ticks and reductions of gradients into its lists; both are left out here. In ours,
idle ticks follow from the durations of the passes.
"""

import subprocess
import sys
from types import SimpleNamespace

from torch.distributed.pipelining import schedules as torch_schedules

SIZES = [
    (ranks, stages, micro_batches)
    for ranks in (1, 2, 3, 4, 5, 8, 16)
    for stages in (1, 2, 3)
    for micro_batches in (1, 2, 3, 4, 7, 8, 16, 20, 31, 33, 64)
]


def order_of_single(schedule, ranks, micro_batches):
    """The order of a schedule with one stage a rank."""
    pipeline = SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)
    order = schedule._get_pipeline_order(pipeline)
    if schedule is torch_schedules.Schedule1F1B:
        # The description, unlike torch's runtime, counts the last rank's forwards from 1.
        last = [action for action in order[ranks - 1] if action]
        first = min(a.microbatch_index for a in last if a.computation_type == "F")
        order[ranks - 1] = [
            a._replace(microbatch_index=a.microbatch_index - first)
            if a.computation_type == "F"
            else a
            for a in last
        ]
    return order


def order_of_multi(schedule, ranks, stages, micro_batches):
    """The order of a schedule with several; None if torch's constructor refuses the sizes."""
    rounds = max(1, micro_batches // ranks)
    if schedule is torch_schedules.ScheduleInterleaved1F1B and micro_batches % rounds != 0:
        return None
    pipeline = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=stages,
        num_stages=ranks * stages,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    return {
        rank: schedule._calculate_single_rank_operations(pipeline, rank) for rank in range(ranks)
    }


def torch_table(schedule, ranks, stages, micro_batches):
    if schedule == "GPipe":
        order = order_of_single(torch_schedules.ScheduleGPipe, ranks, micro_batches)
    elif schedule == "1F1B":
        order = order_of_single(torch_schedules.Schedule1F1B, ranks, micro_batches)
    elif schedule == "ZBV":
        order = order_of_multi(torch_schedules.ScheduleZBVZeroBubble, ranks, 2, micro_batches)
    else:
        kind = torch_schedules.ScheduleInterleaved1F1B
        order = order_of_multi(kind, ranks, stages, micro_batches)
    if order is None:
        return None
    lists = ([str(action) for action in order[rank] if action] for rank in range(ranks))
    return [",".join(a for a in actions if "REDUCE_GRAD" not in a) for actions in lists]


def requests():
    for ranks, stages, micro_batches in SIZES:
        if stages == 1:
            yield "GPipe", ranks, 1, micro_batches
            if micro_batches >= ranks:  # torch needs as many micro-batches as stages
                yield "1F1B", ranks, 1, micro_batches
        if stages == 2:
            yield "ZBV", ranks, 2, micro_batches
        yield "interleaved", ranks, stages, micro_batches


def test_tables_are_torchs(program):
    asked = list(requests())
    text = "".join(" ".join(map(str, request)) + "\n" for request in asked)
    printed = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    answers = printed.stdout.split("\n\n")[:-1]
    assert len(answers) == len(asked)
    seen = {"equal": 0, "refused": 0}
    for request, answer in zip(asked, answers, strict=True):
        expected = torch_table(*request)
        if expected is None:
            assert answer.startswith("refused: "), request
            seen["refused"] += 1
            continue
        assert answer.splitlines() == expected, request
        seen["equal"] += 1
    print(seen)
    assert min(seen.values()) > 0


if __name__ == "__main__":
    test_tables_are_torchs(sys.argv[1])
