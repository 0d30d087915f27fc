"""The sources of a part: which files its one unit reaches, their bytes, and a hash over them."""

from __future__ import annotations

import hashlib
import os
import re
from typing import NamedTuple

from .errors import ToolchainError

MARKER = "TEJIT_SOURCES"
# From the mark on, which is found quickly; whether it begins its line is looked at after.
_INCLUDE = re.compile(rb'#[ \t]*include[ \t]*[<"]([^">\n]+)[">]')


def default_root() -> str:
    """The folder of the C++ and CUDA sources: a checkout's own, else the one inside the installed package."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    checkout = os.path.join(os.path.dirname(package), "cuda_src")
    # Beside an installed package some other project's `cuda_src` may lie: only the marker makes it ours.
    if os.path.isfile(os.path.join(checkout, MARKER)):
        return checkout
    return os.path.join(package, "_cuda_src")


class SourceSet(NamedTuple):
    """A unit and all files it includes from the sources root.

    The bytes are kept: what is hashed is what is compiled, whatever happens to the files meanwhile.
    """

    unit: str
    files: tuple[tuple[str, bytes], ...]
    foreign: tuple[str, ...] = ()  # what they include from elsewhere

    def split(self, most: int) -> list[str]:
        """The text of at most `most` units that together are this one.

        A unit that includes other `.cpp` or `.cu` files is nothing but them, the longest first.
        """
        pieces = [name for name in self._included_by_unit() if name.endswith((".cpp", ".cu"))]
        count = min(most, len(pieces))
        if count < 2:
            return [f'#include "{self.unit}"\n']
        units = [""] * count
        for place, name in enumerate(pieces):
            # Forth and back, so that whoever has the longest has the shortest too.
            lap, step = divmod(place, count)
            units[count - 1 - step if lap % 2 else step] += f'#include "{name}"\n'
        return units

    def _included_by_unit(self) -> list[str]:
        text = next((data for name, data in self.files if name == self.unit), b"")
        return [match[1].decode("utf-8", "replace") for match in _INCLUDE.finditer(text)]

    @property
    def digest(self) -> str:
        """Hash over names and contents, independent of where the sources lie."""
        total = hashlib.sha256()
        for name, data in self.files:
            total.update(f"{name}\0{len(data)}\0".encode())
            total.update(data)
        return total.hexdigest()

    def write_to(self, folder: str) -> None:
        """Write the files below `folder`."""
        for name, data in self.files:
            path = os.path.join(folder, *name.split("/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as out:
                out.write(data)


def collect(root: str, unit: str) -> SourceSet:
    """Read `unit` (a name below `root`) and everything it includes from there, in whichever branch of an #if.

    Raises:
        ToolchainError: the unit is not there; the installation is broken.
    """
    read: dict[str, bytes] = {}
    known: dict[tuple[str, bytes], str | None] = {}  # headers are included many times over
    tree = _Tree(root)
    foreign: set[str] = set()
    waiting = [unit]
    while waiting:
        name = waiting.pop()
        if name in read:
            continue
        data = _read(root, name)
        if data is None:
            raise ToolchainError(
                f"the kernel sources have no {name} (looked in {root})",
                "the installation is incomplete: install tejit again",
            )
        read[name] = data
        beside = os.path.dirname(name)
        for match in _INCLUDE.finditer(data):
            if data[data.rfind(b"\n", 0, match.start()) + 1 : match.start()].strip(b" \t"):
                continue
            target = (beside, match[1])
            if target not in known:
                known[target] = _found(tree, *target)
            found = known[target]
            if found is not None:
                waiting.append(found)
            else:
                foreign.add(match[1].decode("utf-8", "replace"))
    return SourceSet(unit, tuple(sorted(read.items())), tuple(sorted(foreign)))


class _Tree:
    """The files below a folder. Each folder is listed once: on every import most names asked for are not there, and to
    ask the system for each took as long as reading all sources."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._listed = {"": frozenset(os.listdir(root) if os.path.isdir(root) else ())}

    def __contains__(self, name: str) -> bool:
        # What was found is asked about: a folder, or a link to nowhere, may be called as a header is.
        return self._is_listed(name) and os.path.isfile(os.path.join(self._root, name))

    def _is_listed(self, name: str) -> bool:
        folder, _, last = name.rpartition("/")
        return last in self._in(folder)

    def _in(self, folder: str) -> frozenset[str]:
        listed = self._listed.get(folder)
        if listed is None:
            path = os.path.join(self._root, folder)
            listed = frozenset(os.listdir(path) if self._is_listed(folder) and os.path.isdir(path) else ())
            self._listed[folder] = listed
        return listed


def _found(tree: _Tree, beside: str, target: bytes) -> str | None:
    """The name below the root of what a file in the folder `beside` includes as `target`; None where it is not ours."""
    name = target.decode("utf-8", "replace")
    for candidate in (f"{beside}/{name}" if beside else name, name):
        if "./" in candidate or "//" in candidate:
            candidate = os.path.normpath(candidate).replace(os.sep, "/")
        if not candidate.startswith(("../", "/")) and candidate in tree:
            return candidate
    return None


def _read(root: str, name: str) -> bytes | None:
    try:
        with open(os.path.join(root, name), "rb") as source:
            return source.read()
    except FileNotFoundError:
        return None
