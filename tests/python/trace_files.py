# SPDX-License-Identifier: BSD-3-Clause
"""Traces of ranks that never were, as src/core/trace/format.h lays them out."""

import dataclasses
import fcntl
import os
import pathlib
import struct
import time

HEADER_BYTES, GROUP_BYTES, GROUPS, ENTRY_BYTES = 4096, 256, 128, 128
NO_DTYPE = 255
STARTED, COMPLETED, FAILED = 2, 3, 4


@dataclasses.dataclass
class Call:
    """A collective of the one group, begun so many seconds ago; `took` is None while it runs."""

    name: str
    sequence: int
    ago: float
    took: float | None = None


def _put(memory, offset, form, *values):
    struct.pack_into("<" + form, memory, offset, *values)


def _text(memory, offset, size, text):
    raw = text.encode()[: size - 1]
    memory[offset : offset + len(raw)] = raw


def trace_bytes(rank, world, calls, *, job, group, run_id="", host="node0", failure="", entries=16):
    """The file of a rank of this process."""
    memory = bytearray(HEADER_BYTES + GROUPS * GROUP_BYTES + entries * ENTRY_BYTES)
    wall, mono = time.time_ns(), time.monotonic_ns()
    _put(
        memory,
        0,
        "8sIIIIII",
        b"mustrace",
        3,
        HEADER_BYTES,
        GROUP_BYTES,
        GROUPS,
        ENTRY_BYTES,
        entries,
    )
    since = 120 * 10**9  # it began two minutes ago
    # Without a start and a pid namespace no reader finds that this process outlives its ranks.
    _put(memory, 32, "iiqQQqq", rank, world, os.getpid(), 0, 0, wall - since, mono - since)
    _text(memory, 80, 64, host)
    _text(memory, 144, 40, pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    _text(memory, 184, 128, job)
    _text(memory, 312, 64, run_id)
    _put(memory, 384, "QQ", len(calls), 1)
    _put(memory, 456, "Qq", bool(failure), wall if failure else 0)
    _text(memory, 472, 1024, failure)
    started = max((call.sequence for call in calls), default=0)
    ended = max((call.sequence for call in calls if call.took is not None), default=0)
    _put(memory, HEADER_BYTES, "QQiiII", started, ended, world, rank, 1, 0)
    _text(memory, HEADER_BYTES + 32, 96, group)
    members = (1 << min(world, 1024)) - 1
    memory[HEADER_BYTES + 128 : HEADER_BYTES + 256] = members.to_bytes(128, "little")
    for ticket, call in enumerate(calls, 1):
        at = HEADER_BYTES + GROUPS * GROUP_BYTES + (ticket - 1) % entries * ENTRY_BYTES
        outcome = 0
        if call.took is not None:
            outcome = COMPLETED << 60 | (ticket & 0xFFFF) << 44 | int(call.took * 1e9)
        _put(memory, at, "QQ", 2 * ticket, outcome)
        _put(memory, at + 16, "Qqqq", call.sequence, mono - int(call.ago * 1e9), 4096, 0)
        _text(memory, at + 80, 24, call.name)
        _put(memory, at + 104, "iIHBB", -1, 1, 0, NO_DTYPE, STARTED)
    return bytes(memory)


class SimulatedJob:
    """A job whose ranks all seem to be this process, which holds their files while it lives."""

    def __init__(self, folder, world, calls_of, **words):
        """`calls_of(rank)` is the list of a rank's calls."""
        self.folder = folder / ("job-" + words["job"])
        self.folder.mkdir(mode=0o700)
        self._held = []
        for rank in range(world):
            path = self.folder / f"rank{rank}.trace"
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            os.write(descriptor, trace_bytes(rank, world, calls_of(rank), **words))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._held.append(descriptor)

    def end(self):
        """From now on the ranks are dead."""
        while self._held:
            os.close(self._held.pop())
