"""API keys: who may ask, and how much at once. Keys are kept as hashes and compared in constant time.

A key is random and long, so one SHA-256 is enough: there is no word list to try against it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
HASH = re.compile(r"[0-9a-f]{64}")
CONCURRENCY = re.compile(r"concurrency=([1-9]\d{0,3})", re.ASCII)
RATE = re.compile(r"rate=([1-9]\d{0,5})/(s|min|h)", re.ASCII)
UNIT_S = {"s": 1, "min": 60, "h": 3600}
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Rate:
    """*count* requests in *seconds*; as many at once after a pause as that long."""

    count: int
    seconds: int


@dataclass(frozen=True)
class ApiKey:
    """One line of the file. ``concurrency`` is how many requests at once; None is no limit of its own."""

    name: str
    sha256: bytes
    concurrency: int | None = None
    rate: Rate | None = None


class KeysInvalid(ValueError):
    """The file cannot be read as keys; the message has every mistake, by line."""


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys in *path*.

    Each line is ``NAME SHA256 [concurrency=N] [rate=N/s|N/min|N/h]``; empty ones and those after ``#`` are
    nothing.

    Raises:
        KeysInvalid: a line is wrong, a name or a key is there twice, or there is no key at all.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise KeysInvalid(f"{error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise KeysInvalid(f"over {MAX_BYTES} bytes")
    mistakes: list[str] = []
    keys: list[ApiKey] = []
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        try:
            if words:
                keys.append(_parse(words, keys))
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
    if not keys and not mistakes:
        mistakes.append("there is no key, so nobody could ask")
    if mistakes:
        raise KeysInvalid("; ".join(mistakes[:20]))
    return tuple(keys)


def _parse(words: Sequence[str], others: Sequence[ApiKey]) -> ApiKey:
    name, digest, limits = words[0], "".join(words[1:2]), words[2:]
    if not NAME.fullmatch(name):
        raise ValueError("the name is not 1 to 64 of letters, digits and ._@-")
    if not HASH.fullmatch(digest):
        raise ValueError("after the name comes the key's SHA-256 in 64 lower-case hexadecimal digits")
    key = ApiKey(name, bytes.fromhex(digest))
    for word in limits:
        key = _limited(key, word)
    if any(key.name == other.name or key.sha256 == other.sha256 for other in others):
        raise ValueError(f"{name!r} has the name or the key of another line")
    return key


def _limited(key: ApiKey, word: str) -> ApiKey:
    if concurrency := CONCURRENCY.fullmatch(word):
        return replace(key, concurrency=int(concurrency[1]))
    if rate := RATE.fullmatch(word):
        return replace(key, rate=Rate(int(rate[1]), UNIT_S[rate[2]]))
    raise ValueError(f"{word[:40]!r} is neither concurrency=N nor rate=N/s, N/min or N/h")


def find_key(keys: Sequence[ApiKey], given: str) -> ApiKey | None:
    """Return the key whose secret is *given*, after looking at all of them."""
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def new_key() -> tuple[str, str]:
    """Return a new secret, 256 random bits, and its SHA-256 in hexadecimal digits."""
    secret = "ws-" + secrets.token_urlsafe(32)
    return secret, hashlib.sha256(secret.encode()).hexdigest()
