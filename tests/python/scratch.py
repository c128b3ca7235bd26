# SPDX-License-Identifier: BSD-3-Clause
"""Files of the ranks of a run, and the places where they meet."""

import atexit
import fcntl
import functools
import glob
import os
import shutil
import socket
import tempfile
import time

# For what must come to an end: only a fault makes a test wait for so long.
LIMIT_S = 600 if os.environ.get("MUSTER_TEST_LONG") else 300
PREFIX = "muster-test-run-"


def _lock(folder):
    """A descriptor that holds the folder's lock, None where another run's processes have it; forked
    ranks have it too.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def sweep(place=None):
    """Removes what runs have left that were killed. Folders of the last minute may not have been
    locked yet by their makers.
    """
    for folder in glob.glob(os.path.join(place or tempfile.gettempdir(), PREFIX + "*")):
        try:
            if time.time() - os.stat(folder).st_mtime < 60:
                continue
            descriptor = _lock(folder)
        except OSError:  # it went meanwhile, or is another user's
            continue
        if descriptor is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


@functools.cache
def _folder():
    """This run's own, for all that its ranks need on the disk. It goes with the run, or where that
    is killed, at the next one's start.
    """
    sweep()
    folder = tempfile.mkdtemp(prefix=PREFIX)
    _lock(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_held = []


def _bound(family, host, port):
    try:
        bound = socket.socket(family)
    except OSError:  # a host without IPv6
        return None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        return None
    _held.append(bound)
    return bound


def reserve_port():
    """A port that is free on this host's loopback, for a server that asks for it by its number with
    SO_REUSEADDR, as every server does. Sockets that do not listen keep it for the run: the system
    gives it to no other, neither for port 0 nor for an outgoing connection.
    """
    for _ in range(100):
        port = _bound(socket.AF_INET, "127.0.0.1", 0).getsockname()[1]
        if _bound(socket.AF_INET6, "::1", port) or not _bound(socket.AF_INET6, "::1", 0):
            return port
    raise OSError("no port is free")


def meeting_file():
    """A file name, not there yet, for a job to meet by."""
    return os.path.join(tempfile.mkdtemp(dir=_folder()), "store")
