# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as forks of one process that has imported torch once, for the workers beside this file."""

import os
import signal
import sys
import traceback


def run_ranks(count, body):
    """body(rank) in `count` children. The first that fails ends the others, and this process with
    its exit code; else that is 0.
    """
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                body(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status != 0:
            for other in children:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            sys.exit(abs(os.waitstatus_to_exitcode(status)))
    sys.exit(0)
