#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""A switch between network interfaces that delivers every frame some time after it has arrived.

    delay_relay.py --delay-ms 50 INTERFACE...

It adds the delay of a long way to links between network namespaces, as the kernel's netem does
where there is one; bench/hosts_places.py starts it. It reads the two addresses of an Ethernet
frame and nothing of what the frame carries. Frames that wait take at most --limit-mib; more are
dropped, as by a router whose queue is full. Of a large frame that the kernel has not yet cut into
packets (GSO), it passes on the kernel's description too. Prints a line once it listens. At SIGTERM
it says how many frames it has delivered and dropped, and ends.
"""

import argparse
import collections
import contextlib
import errno
import select
import signal
import socket
import sys
import time

# From linux/if_packet.h, linux/if_ether.h and linux/virtio_net.h.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
DESCRIPTION = 10  # bytes before a frame
LARGEST = DESCRIPTION + 14 + 65536 + 64
#: Each socket has so many for frames that come while this program does not run.
SOCKET_BYTES = 1 << 25
#: Frames of one interface before the others, and those that are due, have their turn.
TURN = 64
MOST_ADDRESSES = 4096


class DelayLine:
    """Frames on their way, each with the ports that it is for; at most `limit` bytes of them."""

    def __init__(self, delay_s, limit):
        self.delay_s, self.limit = delay_s, limit
        self.held = self.dropped = 0
        self.frames = collections.deque()

    def put(self, now, ports, frame):
        if self.held + len(frame) > self.limit:
            self.dropped += 1
            return
        self.held += len(frame)
        self.frames.append((now + self.delay_s, ports, frame))

    def due(self, now):
        """Takes out those whose time has come, in the order in which they came."""
        while self.frames and self.frames[0][0] <= now:
            _, ports, frame = self.frames.popleft()
            self.held -= len(frame)
            yield ports, frame

    def wait_s(self, now):
        """Until the next is due; None: none is on its way."""
        return max(0, self.frames[0][0] - now) if self.frames else None


class Addresses:
    """Which port an Ethernet address was last seen at."""

    def __init__(self, ports):
        self.ports = ports
        self.known = {}

    def ports_for(self, port, frame):
        """The ports to which a frame goes that came by `port`."""
        at = DESCRIPTION
        there, here = frame[at : at + 6], frame[at + 6 : at + 12]
        if len(self.known) < MOST_ADDRESSES or here in self.known:
            self.known[here] = port
        if (known := self.known.get(there)) is not None and not there[0] & 1:
            return (known,) if known != port else ()
        return tuple(each for each in self.ports if each != port)


def open_port(interface):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for number in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
        port.setsockopt(socket.SOL_SOCKET, number, SOCKET_BYTES)
    port.setblocking(False)
    port.bind((interface, ETH_P_ALL))
    return port


class Relay:
    def __init__(self, interfaces, delay_s, limit):
        self.ports = [open_port(interface) for interface in interfaces]
        self.numbers = {port.fileno(): number for number, port in enumerate(self.ports)}
        self.addresses = Addresses(range(len(self.ports)))
        self.line = DelayLine(delay_s, limit)
        self.buffer = memoryview(bytearray(LARGEST))
        self.delivered = 0
        self.polled = select.epoll()
        for port in self.ports:
            self.polled.register(port.fileno(), select.EPOLLIN)

    def receive(self, number):
        port = self.ports[number]
        for _ in range(TURN):
            try:
                size = port.recv_into(self.buffer)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ENETDOWN:  # and up again
                    return
                raise
            if size < DESCRIPTION + 14:
                continue
            frame = bytes(self.buffer[:size])
            if ports := self.addresses.ports_for(number, frame):
                self.line.put(time.monotonic(), ports, frame)

    def deliver(self):
        for ports, frame in self.line.due(time.monotonic()):
            for number in ports:
                try:
                    self.ports[number].send(frame)
                    self.delivered += 1
                except OSError as error:  # the link's queue is full, or it is down
                    full = (errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN, errno.ENXIO)
                    if error.errno not in full:
                        raise
                    self.line.dropped += 1

    def run(self):
        while True:
            wait = self.line.wait_s(time.monotonic())
            for descriptor, _ in self.polled.poll(wait):
                self.receive(self.numbers[descriptor])
            self.deliver()


def main(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("interfaces", nargs="+", metavar="INTERFACE")
    parser.add_argument("--delay-ms", type=float, required=True, help="of every frame")
    parser.add_argument("--limit-mib", type=int, default=64, help="of those that wait; default 64")
    options = parser.parse_args(words)
    if options.delay_ms < 0 or options.limit_mib < 1 or len(options.interfaces) < 2:
        parser.error("there are two interfaces or more, a delay of 0 or more, and at least 1 MiB")
    relay = Relay(options.interfaces, options.delay_ms / 1e3, options.limit_mib << 20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("listening", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            relay.run()
        finally:
            said = f"{relay.delivered} frames delivered, {relay.line.dropped} dropped"
            print(f"delay_relay: {said}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
