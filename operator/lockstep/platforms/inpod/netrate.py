"""Network of a node: facts about it, and bytes a second that it sends to another node over one rail.

It answers every line of JSON on standard input with one line of JSON, and ends with its input, or when nobody asks any more. A node listens
on the addresses of its rails alone, for connections that begin with the measurement's token; the receiving side counts. The bytes come from
a file and are dropped by the receiver's kernel, so that neither side copies them in Python.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lockstep.platforms.inpod.netfacts import TEXT_MAX, Json, network_facts

PATIENCE_SECONDS = 300.0
"""Seconds without a question after which the program ends: its connection may have broken silently."""
CONNECT_SECONDS = 5.0
STALL_SECONDS = 10.0
"""Seconds without a byte after which a connection counts as broken."""
WARM_UP_PART = 0.25
"""Part of a measurement that isn't counted: windows of TCP open, and a limiter's bucket empties."""
BUCKETS_PER_SECOND = 100
BLOCK_BYTES = 8 << 20
TOKEN_BYTES, HEADER = 32, struct.Struct("!16sHHd")
"""A connection begins with the token, then: measurement, number of the stream, number of streams, seconds. No streams: it is a knock."""
KNOCKS_AT_ONCE = 64
END = b"\n"
DISCARD = struct.pack("ii", 1, 0)
"""Linger for no time: what wasn't sent is dropped."""
PINGS = 8
SO_BINDTODEVICE = getattr(socket, "SO_BINDTODEVICE", 25)


class Arrivals:
    """Bytes of one measurement by time, over all its streams."""

    def __init__(self, streams: int, seconds: float) -> None:
        self._lock = threading.Lock()
        self._missing, self._seconds = streams, seconds
        self._first: float | None = None
        self._buckets: dict[int, int] = {}

    def add(self, size: int, now: float) -> None:
        with self._lock:
            self._first = now if self._first is None else self._first
            bucket = int((now - self._first) * BUCKETS_PER_SECOND)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + size

    def is_over(self, now: float) -> bool:
        """True once the sender's time is over, whatever is still on its way."""
        return self._first is not None and now >= self._first + self._seconds

    def end(self) -> bool:
        """Count a stream as ended. Return True for the last one."""
        with self._lock:
            self._missing -= 1
            return self._missing == 0

    def gigabits(self) -> float:
        """Decimal Gb/s, without the warm-up and what comes later than the sender has sent."""
        first, last = (round(part * self._seconds * BUCKETS_PER_SECOND) for part in (WARM_UP_PART, 1))
        size = sum(size for bucket, size in self._buckets.items() if first <= bucket < last)
        return size * 8 / ((last - first) / BUCKETS_PER_SECOND) / 1e9


class Receiver:
    """Listens on the addresses of a node's rails, and counts what comes."""

    def __init__(self) -> None:
        self.token = b""
        self._measured: dict[bytes, Arrivals] = {}
        self._lock = threading.Lock()

    def listen(self, token: str, addresses: list[str], ports: tuple[int, int] = (0, 0)) -> Json:
        """Listen for streams with this token on a free port of the range. Return the port of each address, or why there is none."""
        self.token = bytes.fromhex(token)
        bound: Json = {}
        for address in addresses:
            try:
                listener = _listener(address, range(ports[0], ports[1] + 1))
            except OSError as error:
                bound[address] = f"can't listen on {address}: {error.strerror or error}"
                continue
            bound[address] = listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return {"ports": bound}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(STALL_SECONDS)
            try:
                start = _exactly(connection, TOKEN_BYTES + HEADER.size)
                if not secrets.compare_digest(start[:TOKEN_BYTES], self.token):
                    return
                name, _, streams, seconds = HEADER.unpack(start[TOKEN_BYTES:])
                if streams == 0:
                    connection.sendall(_proof(self.token, name))
                    return
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(PINGS):
                    connection.sendall(_exactly(connection, 1))
                with self._lock:
                    arrivals = self._measured.setdefault(name, Arrivals(streams, seconds))
                buffer = bytearray(BLOCK_BYTES)
                while not arrivals.is_over(time.monotonic()) and (size := connection.recv_into(buffer, BLOCK_BYTES, socket.MSG_TRUNC)):
                    arrivals.add(size, time.monotonic())
                is_last = arrivals.end()
                if is_last:
                    with self._lock:
                        self._measured.pop(name, None)
                connection.sendall((str(arrivals.gigabits()).encode() if is_last else b"") + END)
                while connection.recv_into(buffer, BLOCK_BYTES, socket.MSG_TRUNC):
                    pass
            except OSError:
                return  # (the sender says what it saw, and closes what it still had to send)


def _proof(token: bytes, name: bytes) -> bytes:
    """Answer to a knock of this name, which only a holder of the token knows."""
    return hmac.digest(token, name, "sha256")


def knock(token: str, source: str, targets: list[list[str | int]], seconds: float) -> Json:
    """Knock at [address, port] of others from this address, all at once. Return why each gave no answer; "" for those that did."""
    with ThreadPoolExecutor(KNOCKS_AT_ONCE) as pool:
        reasons = pool.map(lambda target: _why_no_answer(bytes.fromhex(token), source, str(target[0]), int(target[1]), seconds), targets)
        return {"reasons": list(reasons)}


def _why_no_answer(token: bytes, source: str, target: str, port: int, seconds: float) -> str:
    proof = _proof(token, name := secrets.token_bytes(16))
    try:
        with socket.create_connection((target, port), seconds, (source, 0)) as connection:
            connection.settimeout(seconds)
            connection.sendall(token + HEADER.pack(name, 0, 0, 0.0))
            answer = _exactly(connection, len(proof))
    except TimeoutError:
        return f"no answer in {seconds:.0f} s"
    except OSError as error:
        return f"{error.strerror or error}"[:TEXT_MAX]
    return "" if hmac.compare_digest(answer, proof) else "something else answers"


def _listener(address: str, ports: range) -> socket.socket:
    """Listen on the first free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=128)
        except OSError:
            if port == ports[-1]:
                raise
    raise OSError(f"no port in {ports}")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the connection ended")
        data += part
    return data


def send_for(token: str, source: str, interface: str, target: str, port: int, seconds: float, streams: int) -> Json:
    """Send for so many seconds over `streams` connections, from this address and interface. Return the rate that the receiver has counted.

    `device`: False where the kernel lets only the address choose the way, so that two interfaces in one subnet may be taken for one.
    """
    name, round_trip, opened, is_bound = secrets.token_bytes(16), float("inf"), [], True
    try:
        for stream in range(streams):
            connection, bound = _connected(source, interface, target, port)
            opened.append(connection)
            is_bound = is_bound and bound
            connection.sendall(bytes.fromhex(token) + HEADER.pack(name, stream, streams, seconds))
            round_trip = min(round_trip, *(_ping(connection) for _ in range(PINGS)))
        busy = os.times()
        started = time.monotonic()
        with ThreadPoolExecutor(streams) as pool:
            answers = list(pool.map(lambda connection: _fill(connection, started + seconds), opened))
        spent = os.times()
        used = (spent.user + spent.system - busy.user - busy.system) / (time.monotonic() - started)
    except OSError as error:
        return {"error": f"{error.strerror or error}"[:TEXT_MAX]}
    finally:
        for connection in opened:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DISCARD)
            connection.close()
    gbs = next((float(text) for text in answers if text), None)
    if gbs is None:
        return {"error": "the receiver has lost a connection"}
    return {"gbs": gbs, "microseconds": round(round_trip * 1e6), "cores": round(used, 2), "device": is_bound}


def _connected(source: str, interface: str, target: str, port: int) -> tuple[socket.socket, bool]:
    """A connection from the address, and True if it is bound to the interface, too."""
    connection = socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET)
    try:
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, interface.encode())
            bound = True
        except PermissionError:
            bound = False
        connection.bind((source, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect((target, port))
        connection.settimeout(STALL_SECONDS)
    except TimeoutError:
        connection.close()
        raise OSError(f"no answer in {CONNECT_SECONDS:.0f} s from {target}") from None
    except OSError:
        connection.close()
        raise
    return connection, bound


def _ping(connection: socket.socket) -> float:
    start = time.monotonic()
    connection.sendall(b".")
    _exactly(connection, 1)
    return time.monotonic() - start


def _fill(connection: socket.socket, end: float) -> bytes:
    """Send until then, and return the receiver's answer. It doesn't wait for what is still on its way."""
    with tempfile.TemporaryFile() as file:
        file.truncate(BLOCK_BYTES)
        while (left := end - time.monotonic()) > 0:
            if select.select([], [connection], [], left)[1]:
                with contextlib.suppress(BlockingIOError):
                    os.sendfile(connection.fileno(), file.fileno(), 0, BLOCK_BYTES)
    connection.shutdown(socket.SHUT_WR)
    answer = b""
    while not answer.endswith(END):
        part = connection.recv(4096)
        if not part:
            raise OSError("the receiver has gone")
        answer += part
    return answer[: -len(END)]


RDMA_START_SECONDS = 1.0


class Perftest:
    """ib_write_bw of perftest: a server on the receiving node, a client on the sending one."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def serve(self, device: str, port: int, hca_port: int, gid_index: int | None, seconds: float) -> Json:
        """Start the server. It ends with its one client."""
        self.end()
        command = _perftest(device, port, hca_port, gid_index, seconds)
        try:
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except OSError as error:
            return {"error": f"{command[0]}: {error.strerror}"}
        try:
            output, _ = self._server.communicate(timeout=RDMA_START_SECONDS)
        except subprocess.TimeoutExpired:
            return {"ready": True}
        return {"error": _last_words(output)}

    def end(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.kill()
            self._server.wait()
        self._server = None

    def send(self, device: str, port: int, hca_port: int, gid_index: int | None, seconds: float, target: str) -> Json:
        """Run the client. Return the average that it prints, in Gb/s."""
        command = [*_perftest(device, port, hca_port, gid_index, seconds), target]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"ib_write_bw has not ended after {seconds + 30:.0f} s"}
        except OSError as error:
            return {"error": f"{command[0]}: {error.strerror}"}
        gbs = perftest_gigabits(done.stdout)
        return {"gbs": gbs} if done.returncode == 0 and gbs is not None else {"error": _last_words(done.stdout + done.stderr)}


def _perftest(device: str, port: int, hca_port: int, gid_index: int | None, seconds: float) -> list[str]:
    """Command without the server's address. `-F`: a processor whose clock changes is no error; -D takes whole seconds."""
    gid = [] if gid_index is None else ["-x", str(gid_index)]
    duration = str(max(1, round(seconds)))
    return [
        "ib_write_bw",
        "-d",
        device,
        "-i",
        str(hca_port),
        "-p",
        str(port),
        "-D",
        duration,
        "-F",
        "--report_gbits",
        "-s",
        "1048576",
        *gid,
    ]


def perftest_gigabits(output: str) -> float | None:
    """Average bandwidth in the table of ib_write_bw: bytes, iterations, peak, average, message rate."""
    for line in reversed(output.splitlines()):
        words = line.split()
        if len(words) >= 4 and words[0].isdecimal() and words[1].isdecimal():
            try:
                return float(words[3])
            except ValueError:
                return None
    return None


def _last_words(output: str) -> str:
    return (" | ".join(output.strip().splitlines()[-3:]) or "ib_write_bw ended without a word")[-TEXT_MAX:]


def main() -> None:
    receiver, perftest = Receiver(), Perftest()
    answers: dict[str, Callable[..., Json]] = {
        "facts": network_facts, "listen": receiver.listen, "knock": knock, "send": send_for, "serveRdma": perftest.serve,
        "sendRdma": perftest.send,
    }  # fmt: skip
    try:
        while select.select([sys.stdin], [], [], PATIENCE_SECONDS)[0] and (line := sys.stdin.readline()):
            request = json.loads(line)
            print(json.dumps(answers[request.pop("what")](**request)), flush=True)
    finally:
        perftest.end()


if __name__ == "__main__":
    main()
