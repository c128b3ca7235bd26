# SPDX-License-Identifier: BSD-3-Clause
"""A forked process of a test that is told what to do over a pipe, and says how that went."""

import traceback

import pytest
from ranks import LIMIT_S, fork


def _main(body, arguments, conn):
    try:
        body(*arguments, conn)
    except BaseException:
        conn.send(("broke", traceback.format_exc()))
        raise SystemExit(1) from None


class ToldProcess:
    """Runs `body(*arguments, conn)`; what that sends are tuples of a word and more."""

    def __init__(self, name, body, *arguments):
        self.name = name
        self.conn, theirs = fork.Pipe()
        self.process = fork.Process(target=_main, args=(body, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self):
        if not self.conn.poll(LIMIT_S):
            pytest.fail(f"{self.name} hangs")
        try:
            said = self.conn.recv()
        except EOFError:
            self.process.join()
            pytest.fail(f"{self.name} has ended with {self.process.exitcode}")
        if said[0] == "broke":
            pytest.fail(f"{self.name}:\n{said[1]}", pytrace=False)
        return said

    def kill(self):
        self.process.kill()
        self.process.join()
        self.conn.close()
