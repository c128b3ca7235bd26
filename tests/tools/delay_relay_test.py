# SPDX-License-Identifier: BSD-3-Clause
"""bench/delay_relay.py: what is due when, the bound of memory, and which interface a frame goes to;
bytes between two hosts, if there are root and network namespaces.
"""

import hashlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import delay_relay  # noqa: E402
import hosts_places  # noqa: E402
import hosts_workers  # noqa: E402

LIMIT_S = 300

# Reads four bytes, answers with four, reads to the end and prints what that hashes to.
TAKES = """
import hashlib, socket
server = socket.create_server(("{address}", 4000))
print("listening", flush=True)
with server.accept()[0] as peer:
    peer.sendall(peer.recv(4, socket.MSG_WAITALL))
    whole = hashlib.sha256()
    while part := peer.recv(1 << 16):
        whole.update(part)
print(whole.hexdigest())
"""
# Prints the seconds of one round trip.
GIVES = """
import random, socket, time
with socket.create_connection(("{address}", 4000)) as peer:
    start = time.monotonic()
    peer.sendall(b"ping")
    peer.recv(4, socket.MSG_WAITALL)
    print(time.monotonic() - start)
    peer.sendall(random.Random(1).randbytes({size}))
"""


def frame_of(there, here, size=60):
    return bytes(delay_relay.DESCRIPTION) + there + here + bytes(size - 12)


class DelayLineTest(unittest.TestCase):
    def test_frames_wait_for_the_delay_and_keep_their_order(self):
        line = delay_relay.DelayLine(2, 1000)
        self.assertIsNone(line.wait_s(0))
        line.put(0, (1,), b"a")
        line.put(1, (0, 2), b"b")
        self.assertEqual(line.wait_s(0.5), 1.5)
        self.assertEqual(list(line.due(1.9)), [])
        self.assertEqual(list(line.due(2)), [((1,), b"a")])
        line.put(2.5, (1,), b"c")
        self.assertEqual(list(line.due(9)), [((0, 2), b"b"), ((1,), b"c")])
        self.assertEqual(line.held, 0)
        self.assertIsNone(line.wait_s(9))

    def test_no_more_than_the_limit_waits(self):
        line = delay_relay.DelayLine(1, 10)
        for _ in range(3):
            line.put(0, (1,), b"12345")
        self.assertEqual((line.held, line.dropped), (10, 1))
        self.assertEqual(len(list(line.due(1))), 2)
        line.put(1, (1,), b"1234567890")
        self.assertEqual((line.held, line.dropped), (10, 1))


class BurstTest(unittest.TestCase):
    def test_slow_links_let_less_pass_at_once(self):
        rates = (1e6, 1e7, 5e7, 1e8, 1e9)
        self.assertEqual([hosts_places.burst_kib(rate) for rate in rates], [32, 32, 128, 256, 256])


class AddressesTest(unittest.TestCase):
    def test_a_frame_goes_where_its_address_was_seen(self):
        first, second, all_hosts = b"\2aaaaa", b"\2bbbbb", b"\xff" * 6
        addresses = delay_relay.Addresses(range(3))
        self.assertEqual(addresses.ports_for(0, frame_of(all_hosts, first)), (1, 2))
        self.assertEqual(addresses.ports_for(1, frame_of(first, second)), (0,))
        self.assertEqual(addresses.ports_for(0, frame_of(second, first)), (1,))
        self.assertEqual(addresses.ports_for(1, frame_of(second, first)), ())  # first has moved
        self.assertEqual(addresses.ports_for(0, frame_of(first, second)), (1,))

    def test_no_number_of_addresses_takes_more_memory(self):
        addresses = delay_relay.Addresses(range(2))
        for number in range(delay_relay.MOST_ADDRESSES + 10):
            addresses.ports_for(0, frame_of(b"\xff" * 6, b"\2" + number.to_bytes(5, "big")))
        self.assertEqual(len(addresses.known), delay_relay.MOST_ADDRESSES)


class WorkersTest(unittest.TestCase):
    def start(self, *words):
        run = subprocess.Popen(words)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def test_a_relay_that_has_ended_is_no_wait(self):
        worker, relay = self.start("sleep", "infinity"), self.start("true")
        with self.assertRaisesRegex(SystemExit, "a bench: the relay .* has ended"):
            hosts_workers.wait([worker], [relay], LIMIT_S, "a bench")


def why_no_hosts():
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        return "hosts need root and iproute2"
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0:
        return "this machine makes no network namespaces"
    return ""


@unittest.skipIf(why_no_hosts(), why_no_hosts())
class RelayTest(unittest.TestCase):
    def start(self, hosts, host, program, **values):
        words = [*hosts.inside(host), sys.executable, "-S", "-c", program.format(**values)]
        run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.addCleanup(run.stdout.close)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def test_bytes_arrive_as_they_were_and_no_earlier(self):
        size, round_trip_ms = 8 << 20, 40
        with hosts_places.Hosts(2, 1e9, round_trip_ms=round_trip_ms) as hosts:
            address = hosts.addresses[1]
            takes = self.start(hosts, 1, TAKES, address=address)
            self.assertEqual(takes.stdout.readline(), "listening\n")
            gives = self.start(hosts, 0, GIVES, address=address, size=size)
            said, _ = gives.communicate(timeout=LIMIT_S)
            self.assertGreaterEqual(float(said), round_trip_ms / 1e3)
            found, _ = takes.communicate(timeout=LIMIT_S)
        whole = random.Random(1).randbytes(size)
        self.assertEqual(found.strip(), hashlib.sha256(whole).hexdigest())
        left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        self.assertFalse([name for name in hosts.names if name in left.split()])


if __name__ == "__main__":
    unittest.main()
