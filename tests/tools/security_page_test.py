# SPDX-License-Identifier: BSD-3-Clause
"""docs/user/security.md against the tests and the sources: what the page promises is tested, and
its numbers are theirs.
"""

import fnmatch
import pathlib
import re
import string
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = " ".join((ROOT / "docs/user/security.md").read_text(encoding="utf-8").split())

# The promises of the other sections, and the lines of docs/acceptance.md whose tests prove them.
PROMISES = {
    "A process without it gets nothing but a refusal from the job's store, ranks and launchers": [
        "W1"
    ],
    "With one node, muster listens on loopback and Unix sockets only": ["W7"],
    "Links are refused: give the path of the file itself": ["W3"],
    "A text that does not have the form of `muster secret` is stretched with Argon2id": ["W4"],
    "wipes `MUSTER_SECRET` from its own environment": ["W4"],
    "They are excluded from core dumps and wiped after use": ["W4"],
    (
        "It writes nothing else, reads no other key of the store, "
        "joins no job, and does not learn the secret"
    ): ["W1"],
    "A relay that changes, replays, cuts or splices traffic ends the connection": ["W1"],
    "if another user owns them or can write them, or if they have a second hard link": ["W3"],
    "A relay cannot swap connections of jobs that differ in these": ["W1"],
    "delay one by at most the length of the recording": ["W6"],
    (
        "`init_rpc(functions=[...])` restricts calls, and the "
        "classes that answers may name, to a list"
    ): ["W5"],
    "`MUSTER_ALLOW_PICKLE=0` on all ranks refuses pickles of unknown classes": ["W5"],
    "count the connections that they refuse, and log at most one line a second each": ["W1"],
    (
        "which has no authentication. Every process that reaches it can "
        "keep a job from starting, but cannot join it"
    ): ["W2"],
}

# Sentences of the summary and of the guarantees: words of each, and the tests that prove it; none
# where it promises nothing. A sentence that is not here fails the test.
SENTENCES = {
    "Each job has a **secret**": ["Run.KeepsTheSecretOutOfArgumentsAndEnvironments"],
    "gets nothing but a refusal": ["StoreServerFuzz.*GetNowhere", "*.WrongSecret"],
    "A process with the secret is a rank": [],
    "processes of one user on one host, trust each other": [],
    "With one node, muster listens on loopback": ["Run.ListensOnLoopbackWithOneNode"],
    "can connect to the ports of a job on several nodes": [],
    "A connection has five seconds": [
        "*.AThousandSilentConnections",
    ],
    "Nothing else is parsed or allocated": ["*.LyingLengths", "StoreServer.*HaveLimits"],
    "A listener sees sizes, times and addresses": ["TlsSession.TextIsNotSeenOnTheWay"],
    "A relay that changes, replays, cuts or splices": [
        "TlsRelay.NothingIsAcceptedThatWasTamperedWith",
        "TcpStoreRelay.NothingIsAcceptedThatWasChanged",
        "RelayedLinks.WhatIsChangedEndsTheLinkAndSaysSo",
    ],
    "An answer before the keys are made can be forged": [
        "TcpStoreRelay.AForgedAnswerInTheClearEndsNobody",
        "TcpStoreRelay.AnAnswerInTheClearIsToldAsUnauthenticated",
        "RelayedLinks.AForgedAnswerInTheClearEndsNobody",
    ],
    "keys of their own by Diffie-Hellman": ["TlsSession.BothSidesMakeTheKeyNew"],
    "needs the secret at TCP ports, like any other": ["*.WrongSecretsAreRefusedAlways"],
    "At Unix sockets the kernel reports": ["TcpStore.AnotherUserAtItsUnixSocketIsCounted"],
    "Files that a job reads or writes": [
        "OwnFiles.FilesOfOthers",
        "OwnFiles.Links",
        "OwnFiles.FilesWithSeveralNames",
        "FileStoreTest.FilesOfOthersAreRefused",
        "Run.RefusesLogsThroughLinks",
        "Run.RefusesEventsThatOthersCouldHaveLaid",
        "TraceCommand.WritesThroughNoLink",
    ],
    "refused if another user can read them": ["SecretTest.FilesThatOthersReadAreRefused"],
    "cannot join a job with a new one": ["*.RefusalsSayWhy"],
    "admits its holders to all of them": [],
    "Keys of links and remote calls are bound to one run": ["TlsRelay.RanksAndLivesAreNotSwapped"],
    "Keys of a store are bound to its port": ["TcpStoreRelay.AnotherJobsStoreIsRefused"],
    "A relay cannot swap connections": ["TlsRelay.JobsWithOneSecretAreNotSwapped"],
    "accepts recordings of an earlier job": ["TlsSession.ARecordedConnectionProvesNothing"],
    "Replayed multicast announcements": ["Rendezvous.RecordedAnnouncementsOfAnEarlierRunDo*"],
    "A malicious rank": [],
}

# A number on the page, and where it stands in the sources.
NUMBERS = {
    "A connection has five seconds": [
        ("src/core/transport/connect/acceptor.h", "handshake_limit = std::chrono::seconds(5)"),
        ("src/core/store/server/store_server.h", "greeting_limit = std::chrono::seconds(5)"),
    ],
    "at most 256 connections wait at a time": [
        ("src/core/transport/connect/acceptor.h", "most_pending = 256"),
        ("src/core/store/server/store_server.h", "max_unauthenticated = 256"),
    ],
    "Argon2id (64 MiB": [("src/core/security/secret.cc", "kMemory = std::size_t{64} << 20")],
    "fewer than 16 characters": [("src/core/security/secret.cc", "kShortestText = 16")],
    "fewer than 8 different ones": [("src/core/security/secret.cc", "kLeastDifferent = 8")],
}


def conformance(*arguments):
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "tools/conformance", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


class SecurityPage(unittest.TestCase):
    # spec: W8.true every promise of the page is one that tests prove
    def test_promises_are_tested(self):
        for promise, lines in PROMISES.items():
            with self.subTest(promise):
                self.assertIn(promise, PAGE)
        wanted = sorted({line for lines in PROMISES.values() for line in lines})
        self.assertEqual(wanted, ["W1", "W2", "W3", "W4", "W5", "W6", "W7"])
        self.assertEqual(conformance("--expect", *wanted)[0], 0)

    # spec: W8.true no sentence of the guarantees is without a test, but for those that promise none
    def test_every_guarantee_has_its_tests(self):
        sections = re.findall(r"## (?:Summary|Guarantees) (.*?)(?= ## |$)", PAGE)
        self.assertEqual(len(sections), 2)
        left, said = dict(SENTENCES), conformance("--clauses", *string.ascii_uppercase)[1]
        tests = re.findall(
            r"  \[(.*?), \S+:\d+\]$", said, re.M
        )  # tools/conformance --ran has them run
        for sentence in re.split(r"(?<=\.) (?=[A-Z*-])", " ".join(sections)):
            with self.subTest(sentence):
                matching = [words for words in left if words in sentence]
                self.assertEqual(len(matching), 1, "which tests prove this sentence?")
                for test in left.pop(matching[0]):
                    self.assertTrue(fnmatch.filter(tests, test), f"no test {test} names a line")
        self.assertEqual(left, {}, "the page does not say this any more")

    # spec: W8.page the page's numbers are those of the sources
    def test_numbers_are_those_of_the_sources(self):
        for words, places in NUMBERS.items():
            self.assertIn(words, PAGE)
            for path, text in places:
                self.assertIn(text, (ROOT / path).read_text(encoding="utf-8"), words)
        operators = (ROOT / "src/rpc/wire/operators.cc").read_text(encoding="utf-8")
        said = int(re.search(r"about (\d+) operators of torch", PAGE)[1])
        self.assertAlmostEqual(len(re.findall(r'"[a-z_0-9]+"', operators)), said, delta=10)

    # spec: W8.page the variables and commands that the page names exist
    def test_names_exist(self):
        table = (ROOT / "src/core/base/environment.cc").read_text(encoding="utf-8")
        for name in set(re.findall(r"`((?:MUSTER|GLOO)_[A-Z_]+)", PAGE)):
            self.assertIn(f'"{name}', table)
        commands = (ROOT / "src/faces/cli/commands.cc").read_text(encoding="utf-8")
        for name in set(re.findall(r"`?muster ([a-z]+)[ `]", PAGE)) & {
            "secret",
            "trace",
            "top",
            "doctor",
            "run",
        }:
            self.assertIn(f'{{"{name}", ', commands)
        self.assertIn("docs/user/security.md", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main()
