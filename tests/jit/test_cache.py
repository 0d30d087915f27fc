"""Entries: proved whole, published in one step, never trusted from where others can write."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tejit.jit import cache, leftovers, maintain
from tejit.jit.cache import Entry, Found, find, publish
from tejit.jit.errors import CacheError
from tejit.jit.parts import SCHEMA, Part, host_part
from tejit.jit.roots import Root, choose, prepare, roots
from tejit.jit.settings import Settings

pytestmark = pytest.mark.jit


@pytest.fixture
def part(sources: Path) -> Part:
    return host_part(str(sources))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(str(tmp_path / "root"), "HOME")
    prepare(made)
    return made


def put(part: Part, root: Root, tmp_path: Path, data: bytes = b"\x7fELF and so on", **change: Any) -> Entry:
    built, log = tmp_path / "built.so", tmp_path / "log"
    built.write_bytes(data)
    log.write_text("said the compiler")
    manifest = {
        "schema": SCHEMA,
        "key": part.key,
        "part": part.name,
        "builder": "c++",
        "built": time.time(),
        "file": "tejit.so",
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        **change,
    }
    return publish(str(built), str(log), manifest, part, root)


def test_what_is_published_is_found(part: Part, root: Root, tmp_path: Path) -> None:
    assert find([root], part) == Found()
    entry = put(part, root, tmp_path)
    assert find([root], part) == Found(entry)
    assert sorted(os.listdir(entry.folder)) == ["build.log", "manifest.json", "tejit.so"]
    assert os.stat(entry.folder).st_mode & 0o777 == 0o700
    assert os.listdir(root.store) == [part.key]


def test_the_second_publisher_uses_the_first_ones_entry(part: Part, root: Root, tmp_path: Path) -> None:
    first = put(part, root, tmp_path, b"first")
    second = put(part, root, tmp_path, b"second")
    assert second == first
    assert Path(second.file).read_bytes() == b"first"
    assert os.listdir(root.store) == [part.key]


def test_an_entry_that_is_there_but_not_visible_yet_is_no_failure(
    part: Part, root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NFS shows to the second publisher: the rename fails, and the look-up finds nothing."""
    put(part, root, tmp_path, b"first")
    look, unseen = cache.open_entry, [FileNotFoundError(2, "not there yet")]

    def late(*arguments: Any) -> Entry:
        if unseen:
            raise unseen.pop()
        return look(*arguments)

    monkeypatch.setattr(cache, "open_entry", late)
    assert Path(put(part, root, tmp_path, b"second").file).read_bytes() == b"second"
    assert os.listdir(root.store) == [part.key]


def truncate(folder: Path) -> None:
    (folder / "tejit.so").write_bytes(b"\x7fELF")


def flip(folder: Path) -> None:
    data = bytearray((folder / "tejit.so").read_bytes())
    data[5] ^= 1
    (folder / "tejit.so").write_bytes(data)


def link_library(folder: Path) -> None:
    (folder / "tejit.so").rename(folder / "real.so")
    (folder / "tejit.so").symlink_to("real.so")


def link_folder(folder: Path) -> None:
    folder.rename(folder.parent / "moved")
    folder.symlink_to("moved")


def other_part(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "part": "sm_80"}))


DAMAGES = [
    (truncate, "4 bytes instead of"),
    (flip, "checksum"),
    (lambda folder: (folder / "tejit.so").unlink(), "tejit.so is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda folder: (folder / "manifest.json").write_text('{"schema"'), "cannot be parsed"),
    (lambda folder: (folder / "manifest.json").write_text("[]"), "no object"),
    (other_part, "part is 'sm_80' instead of 'host'"),
    (link_library, "symbolic links"),
    (link_folder, "no directory"),
    (lambda folder: (folder / "tejit.so").chmod(0o666), "others can write"),
    (lambda folder: folder.chmod(0o777), "others can write"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_entry_is_noticed_and_replaced(
    damage: Any, reason: str, part: Part, root: Root, tmp_path: Path
) -> None:
    entry = put(part, root, tmp_path)
    damage(Path(entry.folder))
    found = find([root], part)
    assert found.entry is None
    ((folder, said),) = found.damaged
    assert folder == entry.folder
    assert reason in said
    again = put(part, root, tmp_path, b"built again")
    assert find([root], part) == Found(again)
    assert Path(again.file).read_bytes() == b"built again"


def test_a_named_pipe_in_place_of_the_library_does_not_hang(part: Part, root: Root, tmp_path: Path) -> None:
    entry = put(part, root, tmp_path)
    os.unlink(entry.file)
    os.mkfifo(entry.file)
    found = find([root], part)
    assert found.entry is None
    assert "no regular file" in found.damaged[0][1]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_skipped(mode: int, part: Part, root: Root, tmp_path: Path) -> None:
    put(part, root, tmp_path)
    os.chmod(root.path, mode)
    found = find([root], part)
    assert found.entry is None
    assert found.skipped[0][0] == root.path
    assert f"{mode:04o}" in found.skipped[0][1]
    explicit = Root(root.path, "TEJIT_CACHE_DIR")
    with pytest.raises(CacheError, match=rf"{root.path}.*own uid {os.getuid()}"):
        find([explicit], part)


def test_the_roots_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, tmp = tmp_path / "h", tmp_path / "t"
    home.mkdir()
    tmp.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert [root.path for root in roots(Settings(prebuilt=("/opt/a",)))][:4] == [
        "/opt/a",
        str(tmp_path / "x" / "tejit"),
        str(home / ".cache" / "tejit"),
        str(tmp / f"tejit-{os.getuid()}"),
    ]
    assert [root.path for root in roots(Settings(cache_dir="/c"))] == ["/c"]
    assert not list(home.iterdir()), "a look-up writes nothing"
    monkeypatch.setenv("HOME", "/nonexistent")
    assert "/nonexistent/.cache/tejit" not in [root.path for root in roots(Settings())]


def test_a_home_that_is_no_place_leads_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    home = tmp_path / "h"
    home.mkdir()
    (home / ".cache").write_text("a file")
    monkeypatch.setenv("HOME", str(home))
    root, notes = choose(Settings())
    assert root is not None
    assert root.path == str(tmp_path / "t" / f"tejit-{os.getuid()}")
    assert len(notes) == 1
    assert all(text in notes[0] for text in (str(home), root.path, "TEJIT_CACHE_DIR"))


def test_a_cache_dir_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CacheError, match=rf"{file}.*no directory.*owner uid {os.getuid()}, own uid {os.getuid()}"):
        choose(Settings(cache_dir=str(file)))


def test_growth_old_and_superfluous_entries_go_and_young_ones_stay(root: Root, tmp_path: Path, part: Part) -> None:
    def entry(name: str, age_days: float, size: int) -> Path:
        folder = Path(root.store) / hashlib.sha256(name.encode()).hexdigest()
        folder.mkdir()
        then = time.time() - age_days * 86400
        (folder / "manifest.json").write_text(json.dumps({"part": name, "builder": "c++", "built": then}))
        (folder / "tejit.so").write_bytes(bytes(size))
        for path in (folder / "tejit.so", folder):
            os.utime(path, (then, then))
        return folder

    ancient, old, middle = entry("ancient", 61, 10), entry("old", 20, 6000), entry("middle", 10, 6000)
    young, used = entry("young", 0.01, 60000), entry("used", 70, 10)
    os.utime(used / "tejit.so", None)
    maintain.trim(root, Settings(cache_max_bytes=66500))
    assert not ancient.exists()
    assert not old.exists()
    assert middle.exists()
    assert young.exists()
    assert used.exists(), "the last use counts, not the build"
    maintain.clear(root)
    assert os.listdir(root.store) == []


def test_leftovers_of_killed_builders_are_swept(root: Root) -> None:
    def leave(pid: int, machine: str | None = None) -> Path:
        name = leftovers.new_name(leftovers.STAGING).replace(f"-{os.getpid()}-", f"-{pid}-")
        folder = Path(root.store) / (name.replace(leftovers._machine(), machine) if machine else name)
        folder.mkdir()
        (folder / "tejit.so").write_bytes(b"half")
        return folder

    gone = subprocess.Popen(["true"])
    gone.wait()
    killed, alive, elsewhere, ancient = leave(gone.pid), leave(1), leave(gone.pid, "a" * 12), leave(1, "b" * 12)
    os.utime(ancient, (0, 0))
    maintain.trim(root, Settings())
    assert [folder.exists() for folder in (killed, alive, elsewhere, ancient)] == [False, True, True, False]


def test_an_entry_that_is_avoided_is_not_found(part: Part, root: Root, tmp_path: Path) -> None:
    entry = put(part, root, tmp_path)
    assert find([root], part, avoid=[entry.folder]) == Found()
    cache.move_aside(entry.folder)
    assert os.listdir(root.store) == []
