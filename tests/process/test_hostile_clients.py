"""Whatever clients send, nothing is lost: no 500, no trace in the log, no dead worker, no memory kept."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.service import Server, eventually
from server.memory import own_memory

Launch = Callable[..., Server]
ROUNDS = 5
KEPT_BYTES = 30 << 20  # allocators keep some; a leak of these bodies would be hundreds


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def tensor(**fields: object) -> bytes:
    return json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], **fields}]}).encode()


def requests() -> Iterator[tuple[str, bytes]]:
    """Yield what strangers send, by name."""
    json_type = "Content-Type: application/json"
    speech, infer = "/v1/audio/speech", "/v2/models/tone/infer"
    zeros = bytes(64 << 20)
    yield "header flood", post(speech, b"{}", *(f"X-{n}: {'a' * 100}" for n in range(5000)))
    yield "one huge header", post(speech, b"{}", "X-Big: " + "a" * (1 << 20))
    yield "long request line", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"
    yield "gzip bomb", post(speech, gzip.compress(zeros), json_type, "Content-Encoding: gzip")
    yield "deflate bomb", post(infer, zlib.compress(zeros), json_type, "Content-Encoding: deflate")
    yield "gzip that ends early", post(infer, gzip.compress(b"{}")[:-4], json_type, "Content-Encoding: gzip")
    yield "body over the limit", post(speech, bytes(2 << 20), json_type)
    yield "length over the limit", post(speech, b"{", json_type, length=10**15)
    yield "negative length", post(speech, b"{}", json_type, length=-5)
    yield "two lengths", post(speech, b"{}", json_type, "Content-Length: 3")
    yield "length and chunks", post(speech, b"0\r\n\r\n", json_type, "Transfer-Encoding: chunked")
    yield (
        "broken chunks",
        (f"POST {speech} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{{}}\r\n").encode(),
    )
    yield "body that ends early", post(speech, b'{"model"', json_type, length=500)
    yield "deep JSON", post(speech, b"[" * 200_000, json_type)
    yield "deep field", post(infer, tensor(data=["x"]).replace(b'"x"', b"[" * 5000 + b"]" * 5000), json_type)
    yield "key twice", post(speech, b'{"model": "a", "model": "b"}', json_type)
    yield "not UTF-8", post(speech, b'{"model": "\xff\xfe"}', json_type)
    yield (
        "half a surrogate",
        post(speech, b'{"model": "tone", "input": "\\ud800", "voice": "sine"}', json_type),
    )
    yield "NaN", post(speech, b'{"model": "tone", "input": "a", "voice": "sine", "speed": NaN}', json_type)
    yield "huge number", post(speech, b'{"speed": 1e999, "seed": ' + b"9" * 100_000 + b"}", json_type)
    yield "huge shape", post(infer, tensor(shape=[2**62, 2**62], data=["x"]), json_type)
    yield "negative shape", post(infer, tensor(shape=[-1], data=["x"]), json_type)
    yield "shape without data", post(infer, tensor(shape=[10**9], data=[]), json_type)
    lie = tensor(parameters={"binary_data_size": 2**60})
    binary = ("Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {len(lie)}")
    yield "lying binary size", post(infer, lie + b"xx", *binary)
    huge = b"\xff\xff\xff\xff" + b"x" * 16
    told = tensor(parameters={"binary_data_size": len(huge)})
    yield "element longer than its body", post(
        infer, told + huge, "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(told)}",
    )  # fmt: skip
    yield "header length beyond", post(infer, b"{}", "Inference-Header-Content-Length: 99999999999")
    yield "TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
    yield "HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100)
    yield "no HTTP", b"\x00\xff\r\n\r\n"
    yield "path tricks", b"GET /v2/../../../etc/passwd%00 HTTP/1.1\r\nHost: x\r\n\r\n"
    yield "header injection", post(speech, b"{}", json_type, "X-Request-ID: a\tb")


def send(server: Server, content: bytes) -> bytes:
    """Send *content*, close our side and return what comes back: something, or nothing, but an end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        try:
            client.sendall(content)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before it was all sent
        answer = b""
        try:
            while chunk := client.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
        return answer


def memory(server: Server) -> int:
    rollups = [Path(f"/proc/{w['pid']}/smaps_rollup") for w in server.workers()]
    return sum(own_memory(rollup)["unique_bytes"] for rollup in rollups)


def test_nothing_that_clients_send_costs_anybody_anything(launch: Launch, models: Path) -> None:
    server = launch(models, env={"WARMSERVE_READ_TIMEOUT_S": "2"}).wait_ready()
    pids = {w["pid"] for w in server.workers()}
    cases = list(requests())
    statuses: dict[str, set[bytes]] = {}

    def one(case: tuple[str, bytes]) -> None:
        name, content = case
        statuses.setdefault(name, set()).add(send(server, content)[9:12])

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(one, cases))
        before = memory(server)
        for _ in range(ROUNDS):
            list(clients.map(one, cases))
    assert {name: found for name, found in statuses.items() if any(s.startswith(b"5") for s in found)} == {}
    assert {w["pid"] for w in server.workers()} == pids
    assert "Traceback" not in server.log_text()
    eventually(lambda: memory(server) < before + KEPT_BYTES, what="memory back where it was")
    eventually(lambda: all(w["in_flight"] == 0 for w in server.workers()), what="every place back")
    body = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm"}
    with server.client() as client:
        assert client.post("/v1/audio/speech", json=body).status_code == 200


def test_slow_clients_cost_nobody_a_place_for_long(launch: Launch, models: Path) -> None:
    """More of them than there are places, each with a request that never ends."""
    server = launch(models, env={"WARMSERVE_READ_TIMEOUT_S": "1"}).wait_ready()
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
    try:
        for client in slow:
            client.sendall(post("/v1/audio/speech", b"{", "Content-Type: application/json", length=100))
        body = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm"}
        with server.client() as client:
            assert client.post("/v1/audio/speech", json=body).status_code == 200
        for client in slow:
            assert client.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 503", b"")
    finally:
        for client in slow:
            client.close()
    assert len(server.workers()) == 2 and "Traceback" not in server.log_text()
