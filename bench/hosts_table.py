# SPDX-License-Identifier: BSD-3-Clause
"""The limits, the tables and the rows of `muster-lab hosts`. The limits are explained in its
--help, in hosts.py.
"""

import statistics

WIDTH = 4  # bytes of an element of float32
#: What the busiest direction of the busiest host's links must carry, in parts of a cell's bytes, on
#: so many hosts of so many ranks.
CARRIED = {
    "all_reduce": lambda hosts, _: 2 * (hosts - 1) / hosts,
    "reduce_scatter": lambda hosts, _: (hosts - 1) / hosts,
    "all_gather": lambda hosts, _: (hosts - 1) / hosts,
    "broadcast": lambda *_: 1,
    "all_to_all": lambda hosts, ranks: ranks * (hosts - 1) / hosts,
    "reduce": lambda *_: 1,
    "gather": lambda hosts, _: (hosts - 1) / hosts,
    "scatter": lambda hosts, _: (hosts - 1) / hosts,
}
#: Each rank has all bytes of these; of the others a part.
WHOLE = ("all_reduce", "broadcast", "reduce")


def limit_us(op, size, hosts, ranks_per_host, rate):
    """Microseconds that a host's links need, at `rate` bits a second in each direction, for what
    they must carry in a call of `size` bytes.
    """
    return CARRIED[op](hosts, ranks_per_host) * size * 8 / rate * 1e6


def leaves_nothing(op, size, ranks):
    return size < WIDTH * (1 if op in WHOLE else ranks)


class Table:
    """Columns of microseconds, and either times the limit, if that is given, or muster's time over
    that of the best other library.
    """

    def __init__(self, libraries, with_limit):
        self.libraries = libraries
        self.with_limit = with_limit

    def head(self):
        if self.with_limit:
            columns = [f"{library + ' us':>14}{'x limit':>9}" for library in self.libraries]
            return f"{'':28}{'limit us':>12}" + "".join(columns)
        columns = [f"{library + ' us':>14}" for library in self.libraries]
        return f"{'':28}" + "".join(columns) + f"{'x best other':>14}"

    def line(self, cell, times, limit):
        """`times`: microseconds by library, of those that have any."""
        if self.with_limit:
            columns = [
                f"{times[name]:14.0f}{times[name] / limit:9.2f}"
                if name in times
                else f"{'-':>14}{'-':>9}"
                for name in self.libraries
            ]
            return f"{cell:28}{limit:12.0f}" + "".join(columns)
        columns = [
            f"{times[name]:14.1f}" if name in times else f"{'-':>14}" for name in self.libraries
        ]
        others = [us for name, us in times.items() if name != "muster"]
        compared = "muster" in times and others
        ratio = f"{times['muster'] / min(others):14.2f}" if compared else f"{'-':>14}"
        return f"{cell:28}" + "".join(columns) + ratio


def row_of(figures, **facts):
    """`figures`: pairs of microseconds back to back, and of one call after a barrier."""
    return {
        "bench": "hosts",
        **facts,
        "us": statistics.median(single for _, single in figures),
        "loop_us": statistics.median(loop for loop, _ in figures),
    }
