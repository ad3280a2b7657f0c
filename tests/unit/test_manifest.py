"""What a manifest may say, and the word for everything it may not."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from tests.version_samples import manifest_for, safetensors
from weights.errors import DuplicateKey, FormatUnknown, ManifestInvalid, PathEscapes
from weights.manifest import MAX_BYTES, FileEntry, parse, render

SOUND = manifest_for({"model.safetensors": safetensors()}, warmup=({"text": "hello"},), source="made here")


def changed(**fields):
    table = json.loads(render(SOUND))
    table.update(fields)
    return json.dumps({key: value for key, value in table.items() if value is not ...}).encode()


def changed_file(**fields):
    table = json.loads(render(SOUND))["files"][0]
    table.update(fields)
    return changed(files=[{key: value for key, value in table.items() if value is not ...}])


def test_rendered_manifest_parses_to_the_same():
    assert parse(render(SOUND)) == SOUND


def test_unknown_fields_are_kept_and_rendered_back():
    raw = changed(trained_on=["a", {"b": 1.5}])
    manifest = parse(raw)
    assert manifest.extra == {"trained_on": ["a", {"b": 1.5}]}
    assert json.loads(render(manifest)) == json.loads(raw)


def test_unknown_file_fields_are_kept_and_rendered_back():
    raw = changed_file(mirror="north")
    assert parse(raw).files[0].extra == {"mirror": "north"}
    assert json.loads(render(parse(raw))) == json.loads(raw)


@pytest.mark.parametrize("left_out", ["warmup", "licence", "source"])
def test_optional_fields_may_be_left_out(left_out):
    assert not getattr(parse(changed(**{left_out: ...})), left_out)


def test_another_format_is_refused_before_its_fields():
    with pytest.raises(FormatUnknown) as refusal:
        parse(b'{"format": 2, "name": 7}')
    assert (refusal.value.found, refusal.value.known) == (2, 1)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (changed(format=...), "format"),
        (changed(format=True), "format"),
        (changed(format="1"), "format"),
        (changed(name=...), "name"),
        (changed(name=""), "name"),
        (changed(name="a\nb"), "name"),
        (changed(name="x" * 201), "name"),
        (changed(family=7), "family"),
        (changed(config=[]), "config"),
        (changed(config=None), "config"),
        (changed(precision=...), "precision"),
        (changed(created="yesterday"), "created"),
        (changed(created="2026-13-31T12:00:00Z"), "created"),
        (changed(created="2026-01-31T12:00:00+02:00"), "created"),
        (changed(files={}), "files"),
        (changed(files=["model.safetensors"]), "files[0]"),
        (changed(warmup={}), "warmup"),
        (changed(warmup=[{}, "hello"]), "warmup[1]"),
        (changed(licence=1), "licence"),
        (changed(source=[]), "source"),
        (changed_file(path=...), "files[0].path"),
        (changed_file(path=""), "files[0].path"),
        (changed_file(path="a//b"), "files[0].path"),
        (changed_file(path="./a"), "files[0].path"),
        (changed_file(path="a\\b"), "files[0].path"),
        (changed_file(path="a\x00b"), "files[0].path"),
        (changed_file(path="x" * 256), "files[0].path"),
        (changed_file(path="manifest.json"), "files[0].path"),
        (changed_file(bytes=-1), "files[0].bytes"),
        (changed_file(bytes=2**63), "files[0].bytes"),
        (changed_file(bytes=1.0), "files[0].bytes"),
        (changed_file(bytes=True), "files[0].bytes"),
        (changed_file(sha256="A" * 64), "files[0].sha256"),
        (changed_file(sha256="0" * 63), "files[0].sha256"),
        (changed_file(prefix=None), "files[0].prefix"),
        (changed_file(path="words.txt", prefix="a."), "files[0].prefix"),
        (b"[]", "manifest"),
        (b"", "manifest"),
        (b"{", "manifest"),
        (b"\xff\xfe{}", "manifest"),
        (b'{"format": NaN}', "manifest"),
        (b'{"format": 1e999}', "manifest"),
        (b'{"format": ' + b"9" * 5000 + b"}", "manifest"),
        (b'{"name": "\\ud800"}', "manifest"),
        (b'{"config": ' + b"[" * 40 + b"]" * 40 + b"}", "manifest"),
        (b'{"a":' * 100_000, "manifest"),
        (b" " * (MAX_BYTES + 1), "manifest"),
    ],
)
def test_broken_rule_is_named_by_field(raw, field):
    with pytest.raises(ManifestInvalid) as refusal:
        parse(raw)
    assert refusal.value.field == field


@pytest.mark.parametrize("path", ["/etc/passwd", "../v1/model.safetensors", "a/../../b", ".."])
def test_path_out_of_the_version_is_refused(path):
    with pytest.raises(PathEscapes):
        parse(changed_file(path=path))


@pytest.mark.parametrize("raw", [b'{"format": 1, "format": 2}', b'{"config": {"a": 1, "a": 1}}'])
def test_key_twice_is_refused(raw):
    with pytest.raises(DuplicateKey):
        parse(raw)


def test_file_listed_twice_is_refused():
    with pytest.raises(ManifestInvalid, match=r"files\[1\]\.path"):
        parse(changed(files=json.loads(render(SOUND))["files"] * 2))


def test_path_that_is_file_and_directory_is_refused():
    entry = json.loads(render(SOUND))["files"][0]
    with pytest.raises(ManifestInvalid, match="both"):
        parse(changed(files=[entry | {"path": "a"}, entry | {"path": "a/b"}]))


@pytest.mark.parametrize("config", [{"a": float("nan")}, {"a": {1, 2}}, {"a": "\ud800"}])
def test_render_refuses_what_parse_would_not_read(config):
    with pytest.raises(ManifestInvalid):
        render(dataclasses.replace(SOUND, config=config))


def test_render_refuses_a_path_out_of_the_version():
    with pytest.raises(PathEscapes):
        render(dataclasses.replace(SOUND, files=(FileEntry("../a", 0, "0" * 64),)))


def test_errors_survive_pickling_with_their_fields():
    """The checksums are read in another process, and its refusal has to arrive whole."""
    error = pickle.loads(pickle.dumps(ManifestInvalid(field="files", why="missing")))
    assert (type(error), error.field, error.why) == (ManifestInvalid, "files", "missing")
