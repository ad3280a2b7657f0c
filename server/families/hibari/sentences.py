"""Text cut into sentences, and anything cut into bounded parts; pure functions of strings.

The front end that reads the parts takes quadratic time and worse, so no text reaches it whole.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from hibari.g2p.normalize import TITLES

# Longest run without a space, and most marks in one. The tokenizer peels marks off a word one by one and
# then tries every stretch of what is left: 2,000 of "1:" in a row took it 23 s.
MAX_WORD = 48
MAX_MARKS = 10
# The front end counts up to decillions; digits beyond 24 are read one by one.
LONG_NUMBER = re.compile(r"\d[\d,]{24,}")
CROWDED_WORD = re.compile(rf"(?:[^\W_]*(?:_|[^\w\s])){{{MAX_MARKS}}}(?=\S)")
LONG_WORD = re.compile(rf"\S{{{MAX_WORD}}}(?=\S)")

SENTENCE_END = re.compile(r"""(?<=[.!?…])["”’)\]]*\s+(?=\S)""")
CLAUSE_END = re.compile(r"(?<=[,;:—])\s")


def tidy(text: str) -> str:
    """Return *text* composed (NFC), without invisible characters, its words and numbers of bounded length."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(
        " " if c.isspace() and c != "\n" else "" if c != "\n" and unicodedata.category(c)[0] == "C" else c
        for c in text
    )
    text = LONG_NUMBER.sub(lambda match: " ".join(match.group().replace(",", "")), text)
    text = LONG_WORD.sub(lambda match: match.group() + " ", text)
    return CROWDED_WORD.sub(lambda match: match.group() + " ", text)


def _abbreviates(paragraph: str, end: int, following: str) -> bool:
    """Say whether the mark before *end* belongs to a title, an initial or a lower-case continuation."""
    if following.islower():
        return True
    if paragraph[end - 1] != ".":
        return False
    word = paragraph[: end - 1].rsplit(maxsplit=1)[-1:]
    bare = word[0].lstrip("(\"“'‘[") if word else ""
    return bare in TITLES or (len(bare) == 1 and bare.isupper())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of *text*; a line end also ends one."""
    for line in text.splitlines():
        paragraph, start = line.strip(), 0
        for gap in SENTENCE_END.finditer(paragraph):
            if not _abbreviates(paragraph, gap.start(), paragraph[gap.end()]):
                yield paragraph[start : gap.end()].strip()
                start = gap.end()
        if paragraph[start:].strip():
            yield paragraph[start:].strip()


def bounded(text: str, limit: int) -> Iterator[str]:
    """Yield *text* in parts of at most *limit* characters, cut after a clause, a word, or anywhere."""
    while len(text) > limit:
        window = text[: limit + 1]
        clauses = [match.end() for match in CLAUSE_END.finditer(window) if match.end() > limit // 3]
        cut = clauses[-1] if clauses else window.rfind(" ") + 1
        cut = min(cut or limit, limit)
        if text[:cut].strip():
            yield text[:cut].strip()
        text = text[cut:]
    if text.strip():
        yield text.strip()
