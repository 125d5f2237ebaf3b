"""A checkpoint is whole or an error that says why; what was there before is never lost."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading

import numpy as np
import pytest

from hvdtrain.checkpoint import Contents, files, folders, read, read_meta, write
from hvdtrain.errors import CheckpointError

MODEL = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.array(3), "empty": np.zeros((0, 2))}
NAMES = ["model.safetensors", "optimizer.safetensors", "meta.json", "manifest.json"]


def contents(epoch=3):
    return Contents({"model": MODEL, "optimizer": {}}, {"epoch": epoch, "metrics": {"loss": 0.1}})


@pytest.fixture
def one(tmp_path):
    write(tmp_path / "one", contents())
    return tmp_path / "one"


def sign(folder, manifest):
    """Write a manifest whose own digest is right, and right too for each file it names that is there."""
    for name, entry in manifest["files"].items():
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            entry.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    body = json.dumps(manifest)[:-1]
    (folder / "manifest.json").write_text(f'{body}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n')


def unsigned(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    return manifest


def test_what_was_written_is_read_bit_for_bit(tmp_path):
    columns = np.arange(12.0).reshape(3, 4)
    groups = {"model": {**MODEL, "strided": columns[:, 1], "big-endian": columns.astype(">f8")}, "ranks": {}}
    groups["optimizer"] = {str(t): np.ones(3, t) for t in ("bool", "complex64", "uint64", "int8", "float16")}
    write(tmp_path / "a" / "b", Contents(groups, {"epoch": 3, "π": [None, 1.5]}))
    back = read(tmp_path / "a" / "b")
    assert back.meta == read_meta(tmp_path / "a" / "b") == {"epoch": 3, "π": [None, 1.5]}
    assert back.arrays.keys() == groups.keys()
    for stem, arrays in groups.items():
        assert back.arrays[stem].keys() == arrays.keys()
        for name, array in arrays.items():
            assert back.arrays[stem][name].dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(back.arrays[stem][name], array)
            assert back.arrays[stem][name].flags.writeable


def test_writing_again_replaces_and_leaves_nothing_else(one):
    write(one, contents(4))
    assert read(one).meta["epoch"] == 4
    assert [path.name for path in one.parent.iterdir()] == ["one"]
    assert sorted(path.name for path in one.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize(("share", "files_mode", "folder_mode"), [("", 0o600, 0o700), ("1", 0o664, 0o775)])
def test_a_checkpoint_is_its_owners_alone_unless_it_is_shared(tmp_path, monkeypatch, share, files_mode, folder_mode):
    monkeypatch.setenv("HVDTRAIN_SHARE_FILES", share)
    before = os.umask(0o002)
    try:
        write(tmp_path / "all" / "one", contents())
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "all" / "one").iterdir()} == {files_mode}
    for folder in (tmp_path / "all", tmp_path / "all" / "one"):
        assert stat.S_IMODE(folder.stat().st_mode) == folder_mode


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_and_every_truncation_is_found(one, name):
    whole = (one / name).read_bytes()
    for position in range(len(whole)):
        for bit in {0, 5, position % 8}:
            (one / name).write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
            with pytest.raises(CheckpointError, match=name):
                read(one)
        (one / name).write_bytes(whole[:position])
        with pytest.raises(CheckpointError, match=name):
            read(one)
    (one / name).write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match=name):
        read(one)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.symlink_to("/etc/hostname"), "is a symlink"),
        (lambda path: path.symlink_to(path.with_name("nowhere")), "is a symlink"),
        (os.mkfifo, "is not a file"),
    ],
)
def test_what_is_no_file_is_refused(one, name, put, reason):
    (one / name).unlink()
    put(one / name)
    with pytest.raises(CheckpointError, match=f"{name}.*{reason}"):
        read(one)


def test_a_symlink_to_the_very_content_is_refused_and_other_files_do_not_matter(one):
    (one / "notes.txt").write_text("mine")
    assert read(one).meta["epoch"] == 3
    (one / "meta.json").rename(one.parent / "meta.json")
    (one / "meta.json").symlink_to(one.parent / "meta.json")
    with pytest.raises(CheckpointError, match=r"meta.json is a symlink"):
        read_meta(one)


@pytest.mark.parametrize("name", ["../one/meta.json", "/etc/hostname", "x/y.safetensors", "", "..", "a\0.safetensors"])
def test_a_manifest_that_names_other_places_is_refused(one, name):
    manifest = unsigned(one)
    manifest["files"][name] = {"size": 1, "sha256": "0" * 64}
    sign(one, manifest)
    with pytest.raises(CheckpointError, match="no file of a checkpoint"):
        read(one)


@pytest.mark.parametrize("stem", ["../x", "", "a/b", ".", "A", "a.b", "x\n"])
def test_a_group_of_arrays_cannot_leave_its_folder(tmp_path, stem):
    with pytest.raises(ValueError, match="lower-case"):
        write(tmp_path / "one", Contents({stem: MODEL}, {}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8 + b"{}", b"\x00" * 8, (1 << 40).to_bytes(8, "little") + b"{}", b"\x02" + b"\x00" * 7 + b"[]"],
)
def test_a_file_of_the_right_hash_that_is_no_safetensors_is_an_error(one, content):
    (one / "model.safetensors").write_bytes(content)
    sign(one, unsigned(one))
    with pytest.raises(CheckpointError, match=r"model.safetensors is no safetensors"):
        read(one)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000])
def test_meta_data_of_the_right_hash_that_is_no_object_is_an_error(one, content):
    (one / "meta.json").write_bytes(content)
    sign(one, unsigned(one))
    with pytest.raises(CheckpointError, match=r"meta.json"):
        read_meta(one)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[" * 100_000, b'{"format": true}', b'{"format": 1}', b" " * (2 << 20)]
)
def test_a_manifest_of_nonsense_is_an_error(one, content):
    (one / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        read(one)


@pytest.mark.parametrize("files", [None, {}, {"meta.json": 3}, {"meta.json": {"size": True, "sha256": "0" * 64}}])
def test_a_manifest_without_its_entries_is_an_error(one, files):
    body = json.dumps({"format": 2, "files": files})[:-1]
    digest = hashlib.sha256(body.encode()).hexdigest()
    (one / "manifest.json").write_text(f'{body}, "sha256": "{digest}"}}\n')
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        read(one)


def test_a_newer_format_is_an_error_that_says_to_update(one):
    sign(one, {**unsigned(one), "format": 3})
    with pytest.raises(CheckpointError, match=r"format 3.*update"):
        read(one)


def test_meta_data_is_read_without_the_arrays(one):
    (one / "model.safetensors").unlink()
    assert read_meta(one)["epoch"] == 3


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_what_is_no_folder_is_an_error_that_names_it(tmp_path, kind):
    if kind == "a file":
        (tmp_path / "nowhere").write_text("")
    for reader in (read, read_meta):
        with pytest.raises(CheckpointError, match=r"nowhere cannot be used"):
            reader(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["model.safetensors", "meta.json", "manifest.json"])
def test_a_failed_write_leaves_the_old_checkpoint_and_no_files(one, monkeypatch, name):
    real = os.fsync

    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*as they were"):
        write(one, contents(4))
    assert read(one).meta["epoch"] == 3
    assert [path.name for path in one.parent.iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Contents({"model": {"x": np.array([None])}}, {}), "'x' of model has dtype object"),
        (Contents({"model": {"x": np.ones(2, np.longdouble)}}, {}), "dtype float128"),
        (Contents({"model": {"__metadata__": np.ones(2)}}, {}), "safetensors reserves"),
        (Contents({}, {"x": object()}), "no JSON"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(one, bad, reason):
    with pytest.raises(CheckpointError, match=reason):
        write(one, bad)
    assert read(one).meta["epoch"] == 3


def test_a_folder_or_file_of_other_things_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not a checkpoint, it contains 'thesis.tex'"):
        write(tmp_path / "home", contents())
    with pytest.raises(CheckpointError, match="a file is in its place"):
        write(tmp_path / "file", contents())
    with pytest.raises(CheckpointError, match="was not written"):
        write(tmp_path / "file" / "one", contents())
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"


def test_an_empty_folder_and_a_damaged_checkpoint_are_replaced(one, tmp_path):
    (tmp_path / "empty").mkdir()
    (one / "manifest.json").write_bytes(b"")
    for place in (tmp_path / "empty", one):
        write(place, contents(5))
        assert read(place).meta["epoch"] == 5


def test_a_symlink_to_a_checkpoint_is_read_and_written_through(one, tmp_path):
    (tmp_path / "last").symlink_to(one)
    write(tmp_path / "last", contents(4))
    assert (tmp_path / "last").is_symlink()
    assert read(tmp_path / "last").meta == read(one).meta == contents(4).meta


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_kill_at_any_rename_leaves_a_whole_one_to_be_found(one, monkeypatch, moment):
    renames = 0

    def rename(source, target, real=os.rename):
        nonlocal renames
        renames += 1
        if renames == moment:
            raise Killed
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *args, **options: None)  # a killed process tidies nothing
    try:
        write(one, contents(4))
        write(one, contents(5))
    except Killed:
        assert renames == moment
    assert read(one).meta["epoch"] in (3, 4, 5)
    monkeypatch.undo()
    write(one, contents(6))
    assert read(one).meta["epoch"] == 6
    assert [path.name for path in one.parent.iterdir()] == ["one"]


def test_a_folder_that_fails_is_compared_while_it_is_open(one, monkeypatch):
    """A removed folder's inode number may be the next one's as soon as nobody has it open."""
    compare, opened = files._is_elsewhere, []

    def compare_while_open(*given):
        os.fstat(opened[-1])
        return compare(*given)

    def fail(folder):
        opened.append(folder)
        raise CheckpointError("damaged")

    monkeypatch.setattr(files, "_is_elsewhere", compare_while_open)
    with pytest.raises(CheckpointError, match="damaged"):
        files._in_folder(one, fail)


def test_who_reads_while_another_replaces_always_finds_a_whole_one(one):
    stop = threading.Event()

    def rewrite():
        epoch = 3
        while not stop.is_set():
            write(one, contents(epoch := epoch + 1))

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        seen = [3]
        while seen[-1] < 100 and thread.is_alive():
            seen.append(read(one).meta["epoch"])
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen)
    assert seen[-1] >= 100


def test_a_write_in_flight_is_left_alone_and_a_dead_one_of_another_host_goes_once_it_is_old(one, monkeypatch):
    with folders.temporary(one) as alive:
        folders.clear_leftovers(one.parent, lambda name: name == "one")
        assert alive.is_dir()
    elsewhere = one.parent / ".one.00000000-0123456789ab"
    elsewhere.mkdir()
    (elsewhere / "meta.json").write_text("{}")
    folders.clear_leftovers(one.parent, lambda name: name == "one")
    assert elsewhere.is_dir()  # touched since this process began: it may be alive
    for path in (elsewhere / "meta.json", elsewhere):
        os.utime(path, (1e9, 1e9))
    folders.clear_leftovers(one.parent, lambda name: name == "two")
    assert elsewhere.is_dir()
    folders.clear_leftovers(one.parent, lambda name: name == "one")
    assert not elsewhere.exists()
