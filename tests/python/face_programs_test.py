# SPDX-License-Identifier: BSD-3-Clause
"""Programs that use what torch.distributed documents, with nothing but their imports changed."""

import math
import os

from programs import moved, names_of, program
from ranks import run_ranks

SIZE = 3
FIRST = int(os.environ.get("MUSTER_TEST_SEED", "1"))
SEEDS = range(FIRST, FIRST + 20)


def run_all(rank, texts, folder):
    """The result of each program on this rank."""
    results = []
    for number, text in enumerate(texts):
        own = f"{folder}/{number}"
        os.makedirs(own, exist_ok=True)
        names = {"__name__": f"program{number}"}
        exec(compile(text, f"<program {number}>", "exec"), names)
        results.append(names["main"](rank, SIZE, own))
    return results


def alike(mine, theirs):
    """The same but for the last bits of averages of three."""
    if isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-5, abs_tol=1e-6)
    return mine == theirs


# spec: P1 U1 a random third of the documented calls, 20 times: torch's results with only the import
# changed
def test_programs_move_by_their_import(tmp_path):
    programs = [program(seed) for seed in SEEDS]
    print(f"seeds {SEEDS.start} to {SEEDS.stop - 1}")
    theirs = run_ranks(SIZE, run_all, programs, str(tmp_path / "torch"))
    mine = run_ranks(SIZE, run_all, [moved(each) for each in programs], str(tmp_path / "muster"))
    assert all("torch.distributed" not in moved(each) for each in programs)
    for number, seed in enumerate(SEEDS):
        for rank in range(SIZE):
            here, there = mine[rank][number], theirs[rank][number]
            for name in names_of(seed):
                part = f"{name}_part"
                assert alike(here[part], there[part]), (name, seed, rank, here[part], there[part])
