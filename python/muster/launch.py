# SPDX-License-Identifier: BSD-3-Clause
"""`python -m muster.launch`: `muster run` in torch.distributed.launch's way, where programs are
told their local rank by an argument `--local-rank`, unless --use-env is given. New programs read
LOCAL_RANK: `python -m muster.run`.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from . import run as _run

__all__ = ["launch", "main", "run"]

_AS_WORKER = "--as-worker"


def launch(args: Sequence[str]) -> None:
    """Raises SystemExit with the exit code of the rank that failed first."""
    main(args)


run = _run.run


def _plain(word: str) -> str:
    """--use-env where it has torch's older value: `--use-env=True`."""
    return "--use-env" if re.fullmatch("--use[-_]env=[Tt]rue", word) else word


def _line(given: Sequence[str]) -> list[str]:
    """The arguments for `muster run`."""
    from torch.distributed.launch import parse_args

    given = [_plain(each) for each in given]
    parsed = parse_args(given)
    program = [parsed.training_script, *parsed.training_script_args]
    options = [
        each
        for each in given[: len(given) - len(program)]
        if each not in ("--use-env", "--use_env")
    ]
    if parsed.use_env:
        return [*options, *program]
    if parsed.no_python:
        raise SystemExit(
            "muster.launch: --no-python needs --use-env: the program's own arguments stay as they "
            "are"
        )
    kind = ["-m"] if parsed.module else []
    plain = [each for each in options if each not in ("-m", "--module")]
    return [
        *plain,
        "-m",
        __name__ if __name__ != "__main__" else "muster.launch",
        _AS_WORKER,
        *kind,
        *program,
    ]


def _work(arguments: list[str]) -> None:
    """A worker: the program, with its local rank as the first argument."""
    is_module = arguments[0] == "-m"
    program, *rest = arguments[1:] if is_module else arguments
    sys.argv = [program, f"--local-rank={os.environ['LOCAL_RANK']}", *rest]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


def __getattr__(name: str) -> Any:
    if name in ("get_args_parser", "parse_args"):
        import torch.distributed.launch

        return getattr(torch.distributed.launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(args: Sequence[str] | None = None) -> None:
    """With these arguments; None: the program's own. Raises SystemExit with the exit code of the
    rank that failed first.
    """
    given = sys.argv[1:] if args is None else list(args)
    if given[:1] == [_AS_WORKER]:
        _work(given[1:])
        return
    line = [_run.command(), "run", *_line(given)]
    status = subprocess.run(line, env=_run._environment()).returncode
    if status != 0:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
