# SPDX-License-Identifier: BSD-3-Clause
"""`python -m muster.run`: `muster run`, for programs and people that call torch.distributed.run.
docs/user/launching.md has its options.

`main`, `run`, `get_args_parser`, `parse_args`, `config_from_args`, `elastic_launch` and
`LaunchConfig` are what libraries take from torch.distributed.run. The last three are torch's: their
workers meet over its agent's store, where muster's init_process_group finds them.
"""

import argparse
import grp
import os
import pathlib
import pwd
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

__all__ = ["command", "main", "run"]


def _is_own_group(group: int) -> bool:
    """Whether a group has only this user, as those that many systems make for each user."""
    if os.geteuid() == 0 or group != os.getegid():
        return False
    try:
        name, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


_UNKNOWN_USER = 65534  # all users whom a user namespace does not map


def _could_replace_this() -> tuple[set[int], set[int], set[tuple[int, int]]]:
    """Users and groups who could have replaced this file, which runs already: those of it and of
    the folders above; and these places themselves.
    """
    here = pathlib.Path(__file__).absolute()
    users, groups, places = set(), set(), set()
    for place in (here, *here.parents):
        status = place.stat()
        places.add((status.st_dev, status.st_ino))
        if status.st_uid != _UNKNOWN_USER:
            users.add(status.st_uid)
        # In a sticky folder a group cannot replace what is another's.
        by_group = status.st_mode & stat.S_IWGRP and not status.st_mode & stat.S_ISVTX
        if by_group and status.st_gid != _UNKNOWN_USER:
            groups.add(status.st_gid)
    return users, groups, places


def _is_trusted(path: pathlib.Path) -> bool:
    """Whether only root, this user and those who could have replaced this file can have laid what
    is at `path`: the file, the folders above it and links on the way are theirs, and others can
    write to none of them (a sticky folder such as /tmp counts).
    """
    users, groups, places = _could_replace_this()
    at, left, links = pathlib.Path("/"), list(path.absolute().parts[1:]), 0
    while left:
        name = left.pop(0)
        if name == "..":
            at = at.parent
            continue
        entry = at / name
        status = entry.lstat()
        is_known = (status.st_dev, status.st_ino) in places
        if status.st_uid not in {0, os.geteuid(), *users} and not is_known:
            return False
        if stat.S_ISLNK(status.st_mode):
            links += 1
            target = pathlib.Path(os.readlink(entry))
            left = [*(target.parts[1:] if target.is_absolute() else target.parts), *left]
            at = pathlib.Path("/") if target.is_absolute() else at
            if links > 40:  # the kernel's limit
                return False
            continue
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        is_closed = status.st_gid in groups or _is_own_group(status.st_gid)
        of_others = 0o002 if is_closed else 0o022
        if status.st_mode & of_others and not is_sticky:
            return False
        at = entry
    return True


def command() -> str:
    """The path of the program `muster`: beside the package's build, among the environment's
    scripts, or in PATH, which the user has named. In the first two it is refused if users could
    have put it there who could not have replaced this package. Raises FileNotFoundError.
    """
    package = pathlib.Path(__file__).parent
    # In a build the files are links to the tree's: `__file__` names the link.
    refused = []
    for folder in (package.parents[1] / "bin", pathlib.Path(sysconfig.get_path("scripts"))):
        program = str(folder / "muster")
        if os.access(program, os.X_OK) and program not in refused:
            if _is_trusted(folder / "muster"):
                return program
            refused.append(program)
    found = shutil.which("muster")
    if found is None:
        raise FileNotFoundError(
            "muster.run: there is no program `muster` beside this package, among the environment's "
            "scripts or in PATH"
            + (
                f" that only this user or root can have laid ({', '.join(refused)}: it or a "
                "folder above it is another user's, or can be written by others)"
                if refused
                else ""
            )
            + "; install the wheel, or build the tree (make build)"
        )
    return found


def _environment() -> dict[str, str]:
    """That of the workers: this interpreter's."""
    return {**os.environ, "PYTHON_EXEC": os.environ.get("PYTHON_EXEC", sys.executable)}


def options_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The options, without the program, that `parser` makes these of; those that have its defaults
    are left out.
    """
    options = []
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        if not action.option_strings or value == action.default or value is None:
            continue
        name = max(action.option_strings, key=len)
        options += [name] if action.nargs == 0 else [name, str(value)]
    return options


def run(args: argparse.Namespace) -> None:
    """Runs what `parse_args` has read, and returns when all workers have ended well; else raises
    subprocess.CalledProcessError.
    """
    program = [args.training_script, *args.training_script_args]
    line = [command(), "run", *options_of(args, get_args_parser()), *program]
    subprocess.run(line, check=True, env=_environment())


def main(args: Sequence[str] | None = None) -> None:
    """`muster run` with these arguments (None: the program's own), in place of this process or,
    with args, as its child. Raises SystemExit with the exit code of the rank that failed first.
    """
    given = sys.argv[1:] if args is None else list(args)
    line = [command(), "run", *given]
    if args is None:
        os.execve(line[0], line, _environment())
    status = subprocess.run(line, env=_environment()).returncode
    if status != 0:
        raise SystemExit(status)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    import torch.distributed.run  # it takes a second to import

    try:
        return getattr(torch.distributed.run, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def get_args_parser() -> argparse.ArgumentParser:
    """torch.distributed.run's parser: muster's options have its names."""
    import torch.distributed.run

    return torch.distributed.run.get_args_parser()


if __name__ == "__main__":
    main()
