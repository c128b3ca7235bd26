# SPDX-License-Identifier: BSD-3-Clause
"""The API of Kubernetes as far as Leases go, for tests: written from its documentation
(kubernetes.io/docs/reference/using-api/api-concepts, .../lease-v1).

usage: fake_kubernetes.py PORT STATE_FILE TOKEN_FILE [CERTIFICATE KEY]
Whoever shows a token of TOKEN_FILE (one a line) is served; one that begins with "weak" is forbidden
everything. STATE_FILE keeps the objects, as etcd does; watches know nothing of changes before the
server's start. POST /compact forgets older changes and ends all watches with 410.
POST /garble makes all watches say what is no event. GET /refused says how many reads and writes
were refused for their tokens, with ?reads=R&writes=W once each is more.
"""

import http.server
import json
import pathlib
import ssl
import sys
import threading
import time
import urllib.parse
import uuid

PORT, STATE, TOKENS = int(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
LEASES = "/apis/coordination.k8s.io/v1/namespaces/"


class Refused(Exception):
    def __init__(self, code, reason, message):
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


def expired(revision):
    return Refused(410, "Expired", f"too old resource version: {revision} ({table.oldest})")


def conflict(name, why):
    return Refused(409, "Conflict", f'Operation cannot be fulfilled on leases "{name}": {why}')


class Table:
    """All objects of the server, their one order of changes, and the latest of these."""

    def __init__(self):
        self.changed = threading.Condition()
        self.objects, self.revision = {}, 100
        if STATE.exists():
            saved = json.loads(STATE.read_text())
            self.revision = saved["revision"]
            self.objects = {tuple(key): value for key, value in saved["objects"]}
        self.oldest, self.events, self.garbled = self.revision, [], 0
        self.refused = {"reads": 0, "writes": 0}

    def commit(self, kind, key, lease):
        self.revision += 1
        lease["metadata"]["resourceVersion"] = str(self.revision)
        if kind == "DELETED":
            del self.objects[key]
        else:
            self.objects[key] = lease
        self.events.append((self.revision, kind, key[0], lease))
        saved = {"revision": self.revision, "objects": list(self.objects.items())}
        fresh = STATE.with_suffix(".new")
        fresh.write_text(json.dumps(saved))
        fresh.replace(STATE)
        self.changed.notify_all()
        return lease

    def compact(self):
        with self.changed:
            self.revision += 1
            self.oldest, self.events = self.revision, []
            self.changed.notify_all()

    def wait_for_refused(self, query):
        with self.changed:
            self.changed.wait_for(
                lambda: all(self.refused[of] > int(query.get(of, -1)) for of in self.refused)
            )
            return self.refused

    def garble(self):
        with self.changed:
            self.garbled += 1
            self.changed.notify_all()


def check(lease, space, name):
    metadata = lease.setdefault("metadata", {})
    if metadata.setdefault("namespace", space) != space or metadata.get("name") != name:
        raise Refused(400, "BadRequest", "the name of the object does not match the URL")
    size = sum(len(k) + len(v) for k, v in metadata.get("annotations", {}).items())
    if size > 256 * 1024:
        raise Refused(422, "Invalid", "metadata.annotations: Too long: may not be more than 262144")
    if lease.get("spec", {}).get("leaseDurationSeconds", 1) <= 0:
        raise Refused(422, "Invalid", "spec.leaseDurationSeconds: must be greater than 0")


def create(space, lease):
    name = lease.get("metadata", {}).get("name", "")
    check(lease, space, name)
    if lease["metadata"].get("resourceVersion"):
        raise Refused(
            400, "BadRequest", "resourceVersion should not be set on objects to be created"
        )
    if (space, name) in table.objects:
        raise Refused(409, "AlreadyExists", f'leases.coordination.k8s.io "{name}" already exists')
    lease["metadata"]["uid"] = str(uuid.uuid4())
    return table.commit("ADDED", (space, name), lease)


def existing(space, name):
    if (space, name) not in table.objects:
        raise Refused(404, "NotFound", f'leases.coordination.k8s.io "{name}" not found')
    return table.objects[space, name]


def update(space, name, lease):
    check(lease, space, name)
    metadata = lease["metadata"]
    if (space, name) not in table.objects:  # Leases may be created by PUT
        if metadata.get("uid"):
            raise conflict(name, f"Precondition failed: UID in precondition: {metadata['uid']}")
        return create(space, lease)
    old = table.objects[space, name]["metadata"]
    if not metadata.get("resourceVersion"):
        raise Refused(422, "Invalid", "metadata.resourceVersion: must be specified for an update")
    if metadata.get("uid", old["uid"]) != old["uid"]:
        raise conflict(name, f"Precondition failed: UID in precondition: {metadata['uid']}")
    if metadata["resourceVersion"] != old["resourceVersion"]:
        raise conflict(
            name, "the object has been modified; please apply your changes to the latest"
        )
    metadata["uid"] = old["uid"]
    return table.commit("MODIFIED", (space, name), lease)


def delete(space, name, options):
    lease = existing(space, name)
    for field, wanted in options.get("preconditions", {}).items():
        if lease["metadata"][field] != wanted:
            raise conflict(name, f"Precondition failed: {field} in precondition: {wanted}")
    gone = json.loads(json.dumps(lease))
    table.commit("DELETED", (space, name), gone)
    return {"kind": "Status", "apiVersion": "v1", "status": "Success"}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_request(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "{}")
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            if url.path == "/readyz":
                return self.answer(200, {})
            if url.path == "/compact":
                table.compact()
                return self.answer(200, {})
            if url.path == "/garble":
                table.garble()
                return self.answer(200, {})
            if url.path == "/refused":
                return self.answer(200, table.wait_for_refused(query))
            self.authorize()
            space, _, rest = url.path.removeprefix(LEASES).partition("/")
            resource, _, name = rest.partition("/")
            if not url.path.startswith(LEASES) or resource != "leases":
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            if self.command == "GET" and not name and query.get("watch"):
                return self.watch(space, query)
            with table.changed:
                code, reply = self.carry_out(space, name, body, query)
            self.answer(code, reply)
        except Refused as refused:
            if refused.status["code"] in (401, 403):
                with table.changed:
                    table.refused["reads" if self.command == "GET" else "writes"] += 1
                    table.changed.notify_all()
            self.answer(refused.status["code"], refused.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = handle_request

    def authorize(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in TOKENS.read_text().split():
            raise Refused(401, "Unauthorized", "Unauthorized")
        if token.startswith("weak"):
            raise Refused(
                403,
                "Forbidden",
                'leases.coordination.k8s.io is forbidden: User "system:serviceaccount:test:weak" '
                f'cannot {self.command} resource "leases" in API group "coordination.k8s.io"',
            )

    def carry_out(self, space, name, body, query):
        if self.command == "POST":
            return 201, create(space, body)
        if self.command == "PUT":
            return 200, update(space, name, body)
        if self.command == "DELETE":
            return 200, delete(space, name, body)
        if name:
            return 200, existing(space, name)
        items = [
            lease
            for (where, _), lease in table.objects.items()
            if where == space and self.selected(lease, query)
        ]
        metadata = {"resourceVersion": str(table.revision)}
        return 200, {"kind": "LeaseList", "metadata": metadata, "items": items}

    def selected(self, lease, query):
        name, _, value = query.get("labelSelector", "").partition("=")
        return not name or lease["metadata"].get("labels", {}).get(name) == value

    def watch(self, space, query):
        known = int(query["resourceVersion"])
        with table.changed:
            if known < table.oldest:
                raise expired(known)
            garbled = table.garbled
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        told = time.monotonic()
        while True:
            with table.changed:
                table.changed.wait_for(
                    lambda: table.revision > known or table.garbled > garbled, timeout=1
                )
                if table.garbled > garbled:
                    garbled = table.garbled
                    self.send_chunk("no event")
                gone = known < table.oldest
                news = [event for event in table.events if event[0] > known]
                known = table.revision
            if gone:
                error = {"type": "ERROR", "object": expired(known).status}
                self.send_chunk(error)
                self.wfile.write(b"0\r\n\r\n")
                return
            for _, kind, where, lease in news:
                if where == space and self.selected(lease, query):
                    self.send_chunk({"type": kind, "object": lease})
                    told = time.monotonic()
            if time.monotonic() - told > 1:
                mark = {"kind": "Lease", "metadata": {"resourceVersion": str(known)}}
                self.send_chunk({"type": "BOOKMARK", "object": mark})
                told = time.monotonic()

    def send_chunk(self, line):
        data = json.dumps(line).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


table = Table()
server = Server(("127.0.0.1", PORT), Handler)
if len(sys.argv) > 4:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[4], sys.argv[5])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
