# SPDX-License-Identifier: BSD-3-Clause
"""Programs in Python that start as forks of the test's process: torch has been imported there."""

import os
import subprocess
import sys
import traceback
import types

import torch  # noqa: F401  the programs import it


def _run(program, arguments, environment):
    """In the fork: runs the program as `python -c` does, and ends with its status."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # also the one by which Popen waits for exec
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, errors=errors)
        for number, mode, errors in ((0, "r", None), (1, "w", None), (2, "w", "backslashreplace"))
    )
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(program, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start(program, *arguments, env=None, **options):
    """`subprocess.Popen([sys.executable, "-c", program, *arguments], env=env, **options)`. It is
    not for programs of which the start or the end of Python itself matters: what is registered to
    run at the end does not run.
    """
    environment = dict(os.environ if env is None else env)
    if "muster" in sys.modules:
        # Another file's test has imported it here: it has read this process's variables, and may
        # have threads. The program starts Python itself.
        words = [sys.executable, "-c", program, *arguments]
        return subprocess.Popen(words, env=environment, **options)
    return subprocess.Popen(
        [sys.executable],
        preexec_fn=lambda: _run(program, arguments, environment),
        restore_signals=False,
        **options,
    )
