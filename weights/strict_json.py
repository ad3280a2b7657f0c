"""JSON from files that may be hostile: one meaning or a refusal. Knows nothing of what the JSON says.

Refused beyond the grammar: a key twice in one object, NaN and infinities, numbers too long to hold,
half surrogates (no UTF-8 can carry them), nesting deeper than the caller allows.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

_HALF_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonRefused(ValueError):
    """The bytes are not acceptable JSON."""


class KeyTwice(JsonRefused):
    """One object holds ``key`` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key!r} is there twice")
        self.key = key


def loads(raw: bytes, *, max_depth: int) -> Any:
    """Parse *raw*, UTF-8 without a byte order mark.

    Raises:
        KeyTwice: an object holds a key twice.
        JsonRefused: anything else that is wrong with it.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except JsonRefused:
        raise
    except UnicodeDecodeError as exc:
        raise JsonRefused(f"not UTF-8 at byte {exc.start}") from None
    except RecursionError:
        raise JsonRefused(f"nested deeper than {max_depth}") from None
    except ValueError as exc:  # the grammar, and integers over Python's digit limit
        raise JsonRefused(f"not JSON: {exc}") from None
    _check(value, max_depth, escapes=_HALF_SURROGATE.search(raw) is not None)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise KeyTwice(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return found


def _refuse_constant(name: str) -> Any:
    raise JsonRefused(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonRefused(f"number out of range: {text[:40]}")
    return value


def _check(value: Any, max_depth: int, *, escapes: bool) -> None:
    # Level by level and not by recursion: the depth is what a hostile file chooses.
    level = [value]
    for _ in range(max_depth + 1):
        if escapes:
            for item in level:
                _check_text(item)
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise JsonRefused(f"nested deeper than {max_depth}")


def _check_text(item: Any) -> None:
    for text in item if isinstance(item, dict) else (item,):
        if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
            raise JsonRefused(f"half a surrogate in {text[:40]!r}")
