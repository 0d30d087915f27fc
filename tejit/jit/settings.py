"""TEJIT_* environment variables, read in one place."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .errors import CacheError
from .messages import warn_once

# Compute capabilities that have kernels, with the suffix that lets them use their own instructions.
ARCHS = ("80", "86", "89", "90a", "100a", "103a", "120a", "121a")
COMPILE_MODES = ("import", "lazy", "never")
BACKENDS = ("auto", "kernels", "torch")

# Not compiled here: every process imports this, few have an architecture to read.
_ARCH_FORM = r"(?:sm_?)?(\d{1,2})\.?(\d)(a?)"
_ARCH_EXAMPLES = "write it like 90a, 9.0a, sm_90a or 90; several with ';', ',' or a space between them"


class Settings(NamedTuple):
    """One reading of the environment. Paths are absolute; sizes are bytes; times are seconds."""

    compile: str = "import"
    backend: str = "auto"
    archs: tuple[str, ...] | None = None
    cache_dir: str | None = None
    prebuilt: tuple[str, ...] = ()
    quiet: bool = False
    lock_timeout: float = 300.0
    cache_max_bytes: int = 256 << 20
    cxx: str | None = None
    nvcc: str | None = None
    max_jobs: int | None = None


def arch_of(cc: int) -> str | None:
    """The architecture that serves compute capability `cc` (90 -> "90a"); None where there are no kernels."""
    for arch in ARCHS:
        if int(arch.rstrip("a")) == cc:
            return arch
    return None


def cc_of(arch: str) -> int:
    """Ten times the major plus the minor compute capability of an architecture ("90a" -> 90)."""
    return int(arch.rstrip("a"))


def parse_archs(text: str | Sequence[str], name: str = "TEJIT_ARCH") -> tuple[str, ...]:
    """Read architectures such as "90a;10.0, sm_120a".

    Raises:
        ValueError: an item is unreadable, or names an architecture without kernels.
    """
    items = [text] if isinstance(text, str) else list(text)
    found: list[str] = []
    for item in (part for one in items for part in re.split(r"[;,\s]+", str(one)) if part):
        match = re.fullmatch(_ARCH_FORM, item, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{name}: cannot read the architecture {item!r}; {_ARCH_EXAMPLES}")
        arch = arch_of(10 * int(match[1]) + int(match[2]))
        if arch is None or (match[3] and not arch.endswith("a")):
            raise ValueError(
                f"{name}: there are no kernels for the architecture {item!r}; supported are {', '.join(ARCHS)}"
            )
        if arch not in found:
            found.append(arch)
    if not found:
        raise ValueError(f"{name}: no architecture in {text!r}; {_ARCH_EXAMPLES}")
    return tuple(found)


def _choice(name: str, value: str | None, choices: Sequence[str]) -> str:
    value = (value or "").strip() or choices[0]
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; it is one of {', '.join(choices)}")
    return value


def _number(name: str, value: str | None, default: float, least: float) -> float:
    # A limit that cannot be read is no reason to refuse an import: the default does, and it is said.
    if not value:
        return default
    try:
        number = float(value)
        if number >= least:
            return number
    except ValueError:
        pass
    warn_once(f"{name}={value!r} is no number of at least {least:g}; {default:g} is used")
    return default


def _path(value: str) -> str:
    return os.path.abspath(os.path.expanduser(value))


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read TEJIT_* and MAX_JOBS.

    Raises:
        ValueError: TEJIT_COMPILE, TEJIT_BACKEND or TEJIT_ARCH holds something unknown.
        CacheError: TEJIT_CACHE_DIR holds a character that no path can have.
    """
    env = os.environ if environ is None else environ
    arch, cache_dir = env.get("TEJIT_ARCH", "").strip(), env.get("TEJIT_CACHE_DIR", "")
    if "\0" in cache_dir:
        raise CacheError(f"TEJIT_CACHE_DIR={cache_dir!r} is no path", "set it to a directory, or unset it")
    jobs = env.get("MAX_JOBS", "")
    return Settings(
        compile=_choice("TEJIT_COMPILE", env.get("TEJIT_COMPILE"), COMPILE_MODES),
        backend=_choice("TEJIT_BACKEND", env.get("TEJIT_BACKEND"), BACKENDS),
        archs=parse_archs(arch) if arch else None,
        cache_dir=_path(cache_dir) if cache_dir else None,
        prebuilt=tuple(_path(p) for p in env.get("TEJIT_PREBUILT", "").split(os.pathsep) if p),
        quiet=env.get("TEJIT_QUIET", "").strip().lower() not in ("", "0", "false", "no"),
        lock_timeout=_number("TEJIT_LOCK_TIMEOUT", env.get("TEJIT_LOCK_TIMEOUT"), 300.0, 0.0),
        cache_max_bytes=int(_number("TEJIT_CACHE_MAX_MB", env.get("TEJIT_CACHE_MAX_MB"), 256.0, 1.0) * (1 << 20)),
        cxx=env.get("TEJIT_CXX") or None,
        nvcc=env.get("TEJIT_NVCC") or None,
        max_jobs=int(jobs) if jobs.isdigit() and int(jobs) > 0 else None,
    )


def is_command_line() -> bool:
    """Whether this interpreter was started as `python -m tejit`, whose import must load and build nothing."""
    words = list(getattr(sys, "orig_argv", ()))[1:]
    while words:
        word = words.pop(0)
        if word == "-" or not word.startswith("-"):
            return False
        if word.startswith("--"):
            if word == "--check-hash-based-pycs" and words:
                words.pop(0)
            continue
        # Short options may be bundled (-Im tejit); these four take the rest of the word, or the next one.
        for place, letter in enumerate(word[1:], 1):
            if letter in "mcWX":
                value = word[place + 1 :] or (words.pop(0) if words else "")
                if letter == "m":
                    return value in ("tejit", "tejit.__main__")
                if letter == "c":
                    return False
                break
    return False
