"""Text to symbol numbers: sentences, bounded pieces, hostile text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.families.hibari.sentences import MAX_WORD, bounded, sentences, tidy
from server.families.hibari.text import MAX_SYMBOLS, SpellingAlphabet, TextReader
from tests.hibari import imported

# Pieces on which the front end has stumbled, or whose reading depends on what is around them.
NASTY = (
    "1,000", "-", "$", "st", "'s", "½", "²", "①", "٣", "፩", "é", "漢", "🙂", "\u200d", "\ud800", "[a](/b/)",
    "[x](", "Dr.", "XVIII", "Chapter", "used", "U.S.", "25:61", "13/32/99", "\u2028", "\x00", "İ", "*7",
    "a@b.com", "9" * 60, "\n", " ", ".", ":", "%",
)  # fmt: skip


@pytest.fixture(scope="module")
def reader():
    return TextReader(imported().config["symbols"])


def spell(word: str) -> str:
    return "bˈɑ"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith met J. K. Rowling. She left.", ["Dr. Smith met J. K. Rowling.", "She left."]),
        ("It costs approx. five dollars.", ["It costs approx. five dollars."]),
        ("He said “Stop!” Then he ran.", ["He said “Stop!”", "Then he ran."]),
        ("A heading\nand a line", ["A heading", "and a line"]),
        (" \n ", []),
    ],
)
def test_sentences(text, expected):
    assert list(sentences(text)) == expected


@given(st.text(alphabet="ab ,;", max_size=200), st.integers(1, 40))
def test_bounded_keeps_every_letter_and_the_limit(text, limit):
    parts = list(bounded(text, limit))
    assert all(0 < len(part) <= limit for part in parts)
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")


def test_bounded_prefers_a_clause_then_a_word():
    assert list(bounded("one two, three four", 12)) == ["one two,", "three four"]
    assert list(bounded("one two three", 9)) == ["one two", "three"]


def test_tidy_bounds_words_and_drops_what_is_invisible():
    assert tidy("a\u200db\x00c\td") == "abc d"
    assert max(map(len, tidy("x" * 500 + "1:" * 200).split())) <= MAX_WORD


def test_long_number_is_read_digit_by_digit():
    assert tidy("1" * 30) == " ".join("1" * 30)
    assert tidy("1,234,567") == "1,234,567"


def test_pieces_are_padded_and_bounded(reader):
    pieces = list(reader.pieces("one hundred and twenty " * 60, spell))
    assert len(pieces) > 1
    assert all(piece.symbols[0] == piece.symbols[-1] == 0 for piece in pieces)
    assert all(len(piece.symbols) <= MAX_SYMBOLS + 2 for piece in pieces)


def test_foreign_words_are_skipped_and_the_rest_is_read(reader):
    plain, mixed = (list(reader.pieces(text, spell)) for text in ("Hello, you.", "Hello 漢字, 🙂 you."))
    assert len(mixed) == 1
    assert set(plain[0].symbols) <= set(mixed[0].symbols)


@pytest.mark.parametrize("text", ["", " \n", "...", "?!", "漢字", "🙂", '""', "\ud800", "\x00"])
def test_text_without_speech_has_no_piece(reader, text):
    assert list(reader.pieces(text, lambda word: None)) == []


@pytest.mark.parametrize("text", ["[" * 1000, "1:" * 500, "a-" * 500, "%" * 1000, "." * 1000])
def test_hostile_text_takes_no_time(reader, text):
    """Unbounded, a quarter of these took the front end seconds."""
    started = time.process_time()
    list(reader.pieces(text, spell))
    assert time.process_time() - started < 2.0


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(NASTY), max_size=12).map("".join)))
def test_any_text_becomes_known_symbols(reader, text):
    known = {0, *imported().config["symbols"].values()}
    for piece in reader.pieces(text, spell):
        assert set(piece.symbols) <= known


def test_spelling_alphabet_reads_ctc():
    alphabet = SpellingAlphabet(letters="ab", phonemes="xyz", max_letters=2, slots=4)
    assert alphabet.encode("b?aab") == [2, 1]
    assert alphabet.decode([0, 1, 1, 0, 1, 3, 2, 2, 0]) == "xxzy"
