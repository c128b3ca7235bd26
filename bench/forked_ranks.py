"""Ranks as forks of one process that has imported torch once, for the workers beside this file."""

import os
import sys
import traceback


def run_ranks(count, body):
    """body(rank) in `count` children; ends this process with the worst of their exit codes."""
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
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))
