"""Versions on disk: complete or absent, numbered once, and never deleted while somebody needs them."""

from __future__ import annotations

import os
import shutil
import stat

import pytest

from tests.version_samples import WEIGHTS, make_version, safetensors
from weights import errors, lease, publishing, scratch, store_lock
from weights import store as store_module
from weights.lease import Lease, exclusive, leased_by
from weights.store import Store
from weights.verify import verify_checksums, verify_layout


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "models")


@pytest.fixture
def source(tmp_path):
    return make_version(tmp_path / "source")


@pytest.fixture
def filled(store):
    for name in ("v1", "v2", "v3"):
        make_version(store.root / name)
    return store


def numbers(store):
    return [version.number for version in store.versions()]


# --- listing and pinning ------------------------------------------------------------------------------


def test_missing_store_holds_no_version(store):
    assert (store.versions(), store.pinned(), store.leftovers(), store.sweep()) == ([], None, [], [])
    with pytest.raises(errors.NoVersion):
        store.current()
    store.unpin()


def test_only_complete_versions_are_listed(filled, tmp_path):
    (filled.root / "v9").mkdir()
    (filled.root / "v08").mkdir()
    (filled.root / "v0").mkdir()
    (filled.root / "vx").mkdir()
    (filled.root / "v10").write_text("")
    (filled.root / "v11").symlink_to(filled.root / "v1")
    make_version(filled.root / ".publish-0123")
    make_version(filled.root / "v2.old")
    assert numbers(filled) == [1, 2, 3]
    assert filled.current().name == "v3"


def test_versions_are_ordered_by_number(store, source):
    for name in ("v9", "v10", "v1"):
        shutil.copytree(source, store.root / name)
    assert numbers(store) == [1, 9, 10]


def test_copy_renamed_by_hand_is_a_version(filled):
    shutil.copytree(filled.root / "v1", filled.root / ".mine")
    (filled.root / ".mine").rename(filled.root / "v12")
    assert filled.current().number == 12


def test_pinned_version_is_current_whatever_is_published(filled, source):
    filled.pin(2)
    filled.publish(source)
    assert (filled.pinned(), filled.current().number) == (2, 2)
    assert (filled.root / "CURRENT").read_bytes() == b"v2\n"
    assert stat.S_IMODE((filled.root / "CURRENT").stat().st_mode) == 0o644
    filled.unpin()
    assert (filled.pinned(), filled.current().number) == (None, 4)


def test_pinning_what_is_not_there_is_refused(filled):
    with pytest.raises(errors.VersionNotFound):
        filled.pin(7)
    assert filled.pinned() is None


def test_pin_on_a_missing_version_is_refused_by_file(filled):
    (filled.root / "CURRENT").write_text("v7\n")
    with pytest.raises(errors.VersionNotFound, match="CURRENT") as refusal:
        filled.current()
    assert refusal.value.named_by == filled.root / "CURRENT"


@pytest.mark.parametrize("text", ["", "7\n", "v07\n", "v1\nv2\n", "../v1", "v1" + "0" * 100, "\xff"])
def test_broken_pin_is_refused(filled, text):
    (filled.root / "CURRENT").write_text(text)
    with pytest.raises(errors.PinInvalid, match="CURRENT"):
        filled.current()


def test_fifo_as_pin_is_refused_without_blocking(filled):
    os.mkfifo(filled.root / "CURRENT")
    with pytest.raises(errors.NotRegular):
        filled.current()


def test_store_behind_a_symbolic_link_is_read(filled, tmp_path):
    filled.pin(1)
    (tmp_path / "link").symlink_to(filled.root)
    assert Store(tmp_path / "link").current().number == 1


# --- publishing ---------------------------------------------------------------------------------------


def test_published_version_is_a_sound_copy_that_everyone_can_read(store, source):
    (source / WEIGHTS).chmod(0o600)
    (source / "asset").chmod(0o700)
    version = store.publish(source)
    assert (version.number, version.path) == (1, store.root / "v1")
    verify_checksums(version.path, verify_layout(version.path).manifest)
    assert source.exists()
    assert stat.S_IMODE((version.path / WEIGHTS).stat().st_mode) == 0o644
    assert stat.S_IMODE((version.path / "asset").stat().st_mode) == 0o755
    assert stat.S_IMODE(version.path.stat().st_mode) == 0o755
    assert store.leftovers() == []


def test_moved_source_becomes_the_version(store, source):
    inode = (source / WEIGHTS).stat().st_ino
    version = store.publish(source, move=True)
    assert not source.exists()
    assert (version.path / WEIGHTS).stat().st_ino == inode


def test_moved_source_on_another_file_system_is_copied_and_removed(store, source, monkeypatch):
    monkeypatch.setattr(store_module, "_same_file_system", lambda *_: False)
    version = store.publish(source, move=True)
    assert not source.exists()
    assert verify_layout(version.path)


def test_moving_a_published_version_is_refused(filled):
    with pytest.raises(errors.VersionProtected):
        filled.publish(filled.root / "v1", move=True)
    assert numbers(filled) == [1, 2, 3]


def test_published_version_can_be_published_again(filled):
    assert filled.publish(filled.root / "v1").number == 4


@pytest.mark.parametrize("move", [False, True])
def test_refused_source_leaves_no_trace(store, source, move):
    raw = bytearray((source / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (source / WEIGHTS).write_bytes(raw)
    with pytest.raises(errors.ChecksumWrong):
        store.publish(source, move=move)
    assert (store.versions(), store.leftovers()) == ([], [])
    assert (source / WEIGHTS).read_bytes() == raw


def test_version_larger_than_the_disk_is_refused(store, source, monkeypatch):
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(errors.NoSpace) as refusal:
        store.publish(source)
    assert refusal.value.free_bytes == 10
    assert store.leftovers() == []


def test_disk_that_fills_up_while_copying_is_refused(store, source, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "sendfile", fail)
    with pytest.raises(errors.NoSpace):
        store.publish(source)
    assert (store.versions(), store.leftovers()) == ([], [])


def test_number_is_never_used_twice(filled, source):
    filled.pin(1)
    filled.delete(3)
    assert filled.publish(source).number == 4


@pytest.mark.parametrize("kind", ["empty directory", "file", "dangling link"])
def test_nothing_in_the_way_is_overwritten(filled, source, kind):
    """A plain rename would replace the empty directory without a word."""
    path = filled.root / "v4"
    {
        "empty directory": path.mkdir,
        "file": path.touch,
        "dangling link": lambda: path.symlink_to("nowhere"),
    }[kind]()
    assert filled.publish(source).number == 5
    assert os.path.lexists(path)


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_rename_never_replaces(tmp_path, monkeypatch, kernel):
    if kernel == "old":
        monkeypatch.setattr(publishing, "_RENAME_NOREPLACE", 1 << 30)  # EINVAL, as from NFS
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(errors.VersionExists):
        publishing.rename_new(tmp_path / "a", tmp_path / "b")
    publishing.rename_new(tmp_path / "a", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


# --- interrupted work ---------------------------------------------------------------------------------


def test_sweep_removes_what_nobody_works_in(filled):
    for name in (".publish-a", ".delete-b"):
        make_version(filled.root / name)
    (filled.root / ".pin-c").touch()
    assert len(filled.leftovers()) == 3
    with scratch.hold(filled.root / ".publish-a"):
        assert [path.name for path in filled.sweep()] == [".delete-b", ".pin-c"]
    assert [path.name for path in filled.sweep()] == [".publish-a"]
    assert numbers(filled) == [1, 2, 3]


def test_sweep_follows_no_symbolic_link(filled, tmp_path):
    (tmp_path / "precious").mkdir()
    (filled.root / ".publish-a").symlink_to(tmp_path / "precious")
    filled.sweep()
    assert (tmp_path / "precious").exists()


def test_locked_store_is_refused_after_the_time_allowed(filled, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.05)
    with store_lock.locked(filled.root / ".lock", timeout_s=1), pytest.raises(errors.StoreBusy):
        filled.pin(1)


def test_spoiled_lock_file_does_not_stop_publishing(filled, source):
    (filled.root / ".lock").write_text("nonsense")
    assert filled.publish(source).number == 4


# --- deleting and leases ------------------------------------------------------------------------------


def test_deleted_version_is_gone(filled):
    filled.delete(1)
    assert numbers(filled) == [2, 3]
    assert filled.leftovers() == []


def test_incomplete_version_can_be_deleted(filled):
    (filled.root / "v2" / "manifest.json").unlink()
    filled.delete(2)
    assert not (filled.root / "v2").exists()


def test_deleting_what_is_not_there_is_refused(filled):
    with pytest.raises(errors.VersionNotFound):
        filled.delete(7)


def test_current_pinned_and_protected_versions_are_not_deleted(filled):
    with pytest.raises(errors.VersionProtected, match="current"):
        filled.delete(3)
    with pytest.raises(errors.VersionProtected, match="caller"):
        filled.delete(2, protected={2})
    filled.pin(1)
    with pytest.raises(errors.VersionProtected, match="pinned"):
        filled.delete(1)
    assert numbers(filled) == [1, 2, 3]


def test_leased_version_is_not_deleted(filled):
    with Lease(filled.root / "v1"):
        assert leased_by(filled.root / "v1") == [os.getpid()]
        with pytest.raises(errors.VersionInUse):
            filled.delete(1)
    assert leased_by(filled.root / "v1") == []
    filled.delete(1)


def test_leases_are_shared(filled):
    with Lease(filled.root / "v1") as first, Lease(filled.root / "v1"):
        first.close()
        first.close()
        with pytest.raises(errors.VersionInUse):
            filled.delete(1)


def test_version_held_for_deleting_gives_no_lease(filled):
    with exclusive(filled.root / "v1"), pytest.raises(errors.VersionInUse):
        Lease(filled.root / "v1")


def test_lease_on_a_missing_version_is_refused(filled):
    with pytest.raises(errors.VersionNotFound):
        Lease(filled.root / "v7")


@pytest.mark.parametrize("replaced", [False, True])
def test_version_renamed_away_before_the_lock_gives_no_lease(filled, monkeypatch, replaced):
    flock = lease.fcntl.flock

    def rename_first(fd, operation):
        os.rename(filled.root / "v1", filled.root / ".delete-x")
        if replaced:
            shutil.copytree(filled.root / ".delete-x", filled.root / "v1")
        flock(fd, operation)

    monkeypatch.setattr(lease.fcntl, "flock", rename_first)
    with pytest.raises(errors.VersionNotFound):
        Lease(filled.root / "v1")


def test_reading_a_store_needs_no_write_permission(filled):
    filled.root.chmod(0o555)
    before = sorted(os.listdir(filled.root))
    assert filled.current().number == 3
    with Lease(filled.root / "v3"):
        assert verify_layout(filled.root / "v3")
    assert sorted(os.listdir(filled.root)) == before
    filled.root.chmod(0o755)


def test_source_changed_while_it_was_copied_is_refused(store, source, monkeypatch):
    copy = store_module.copy_version

    def change_after(*arguments):
        copy(*arguments)
        (arguments[1] / WEIGHTS).write_bytes(safetensors({}, b""))

    monkeypatch.setattr(store_module, "copy_version", change_after)
    with pytest.raises(errors.FileSizeWrong):
        store.publish(source)
    assert (store.versions(), store.leftovers()) == ([], [])
