# SPDX-License-Identifier: BSD-3-Clause
"""torch's MultiProcessTestCase with forked ranks: torch is imported once for all of them."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import time

LIMIT_S = 240
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", str(LIMIT_S))  # read at import

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

fork = multiprocessing.get_context("fork")
torch.set_num_threads(1)  # of a pool with more threads a fork has only the locks
logging.getLogger("torch.testing._internal.common_distributed").setLevel(
    logging.WARNING
)  # not each rank that starts


class ForkedRanks(MultiProcessTestCase):
    """The ranks' output goes to `log`. A test counts only if all ranks ended alike."""

    log = os.devnull
    backend_of_torch = (
        None  # whether the default group must stand on torch's own Gloo; None: nobody asks
    )

    def setUp(self):
        super().setUp()
        type(self).meeting = fork.Barrier(int(self.world_size))
        self._start_processes(fork.Process)

    @classmethod
    def _run(cls, rank, *arguments, **options):
        log = os.open(cls.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(
            1
        )  # torch mends its pool at the first call in a fork, which must not be two threads'
        super()._run(rank, *arguments, **options)

    def run_test(self, *arguments):
        if self.backend_of_torch is not None:
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert (
                isinstance(backend, torch._C._distributed_c10d.ProcessGroupGloo)
                == self.backend_of_torch
            ), f"the ranks are on {backend}"
        super().run_test(*arguments)

    def _barrier(self, *_, **__):
        self.meeting.wait(
            LIMIT_S
        )  # the suite's own looks into files ten times a second, and gives up after ten

    def _join_processes(self, test):
        running = {process.sentinel: process for process in self.processes}
        deadline = time.monotonic() + LIMIT_S
        while running and (
            ended := multiprocessing.connection.wait(list(running), deadline - time.monotonic())
        ):
            if any(running.pop(each).exitcode == self.TEST_ERROR_EXIT_CODE for each in ended):
                break
        super()._join_processes(test)

    def _check_return_codes(self, test, elapsed):
        codes = [process.exitcode for process in self.processes]
        ended = None not in codes and self.TEST_ERROR_EXIT_CODE not in codes
        if len(codes) != int(self.world_size) or (ended and len(set(codes)) > 1):
            raise AssertionError(f"of {self.world_size} ranks came, with these exit codes: {codes}")
        super()._check_return_codes(test, elapsed)
