"""Whatever a manifest says, it survives the disk; whatever the disk says, only a WeightsError comes out."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from weights.errors import WeightsError
from weights.manifest import FileEntry, Manifest, parse, render

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=3)
words = st.text(
    st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs"]),
    min_size=1,
    max_size=20,
)
entries = st.builds(
    FileEntry,
    path=st.text("abc-é", min_size=1, max_size=6).map(lambda stem: f"dir/{stem}.safetensors"),
    size_bytes=st.integers(0, 2**63 - 1),
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    prefix=st.text(max_size=5),
    extra=objects.map(lambda extra: {f"x{key}": value for key, value in extra.items()}),
)
manifests = st.builds(
    Manifest,
    name=words,
    family=words,
    config=objects,
    precision=words,
    created=st.datetimes().map(lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20)),
    files=st.lists(entries, max_size=2, unique_by=lambda entry: entry.path).map(tuple),
    warmup=st.lists(objects, max_size=2).map(tuple),
    licence=st.text(max_size=10),
    source=st.text(max_size=10),
    extra=objects.map(lambda extra: {f"x{key}": value for key, value in extra.items()}),
)


@settings(max_examples=20, deadline=None)
@given(manifests)
def test_what_is_rendered_parses_to_the_same(manifest):
    assert parse(render(manifest)) == manifest


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused_and_nothing_else_is_raised(raw):
    try:
        parse(raw)
    except WeightsError:
        return
    raise AssertionError("accepted")


@settings(max_examples=20, deadline=None)
@given(manifests, st.data())
def test_field_replaced_by_anything_is_refused_or_kept(manifest, data):
    table = json.loads(render(manifest))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(values)
    try:
        found = parse(json.dumps(table).encode())
    except WeightsError:
        return
    assert json.loads(render(found)) == {"warmup": [], "licence": "", "source": ""} | table
