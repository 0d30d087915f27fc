"""`python -m tejit warm | info | cache`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import info, loader, maintain
from .errors import TejitError
from .messages import say
from .parts import device_part, host_part
from .roots import Root, choose, roots
from .settings import parse_archs, read_settings
from .sources import default_root


def main(
    argv: Sequence[str] | None = None,
    sources: str | None = None,
    collect: Callable[[str | None], dict[str, Any]] = info.collect,
) -> int:
    """Run the command line; return the exit status: 0, 1 for a failure, 2 for wrong arguments or settings.

    Args:
        sources: root of the C++ and CUDA sources; None: the package's own.
        collect: what ``info`` tells, from that root; must not raise.
    """
    options = _parser().parse_args(argv)
    source_root = sources or default_root()
    if options.command in ("info", "doctor"):
        report = collect(source_root)
        print(json.dumps(report, indent=1, default=str) if options.json else info.as_text(report))
        return 0
    try:
        if options.command == "warm":
            return _warm(options.arch, source_root)
        return _cache(options, source_root)
    except TejitError as error:
        say(str(error))
        return 1
    except ValueError as error:
        say(str(error))
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tejit", description="tejit's compiled kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    warm = commands.add_parser("warm", help="compile what is missing in the cache; no GPU needed")
    _arch_option(warm)
    for name in ("info", "doctor"):
        tell = commands.add_parser(name, help="tools, GPUs, directories and parts; never fails")
        tell.add_argument("--json", action="store_true", help="as one JSON object")
    cache = commands.add_parser("cache", help="the directory of the compiled kernels")
    actions = cache.add_subparsers(dest="action", required=True)
    actions.add_parser("path", help="the directory in use")
    actions.add_parser("list", help="the entries")
    _arch_option(actions.add_parser("key", help="one line that changes when the compiled kernels would"))
    actions.add_parser("prune", help="remove entries that are old, or too much")
    actions.add_parser("clear", help="remove all entries")
    return parser


def _arch_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="A",
        help="an architecture such as 90a; may be repeated",
    )


def _warm(archs: list[str], source_root: str) -> int:
    settings = read_settings()
    if settings.backend == "torch":
        say("TEJIT_BACKEND=torch: nothing is built")
        return 0
    wanted = parse_archs(archs, "--arch") if archs else None
    if not loader.cuda_major():
        say("this torch is built without CUDA: the host part only, no kernels for GPUs")
    elif wanted is None and settings.archs is None and not loader.wanted_archs(settings):
        say("no GPU with kernels here and no --arch: the host part only")
    for name, path in loader.warm(wanted, source_root).items():
        print(f"{name}: {path}")
    return 0


def _cache(options: argparse.Namespace, source_root: str) -> int:
    if not sys.platform.startswith("linux"):
        raise TejitError(f"kernels are compiled on Linux only, this is {sys.platform}", "the reference computes here")
    settings = read_settings()
    if options.action == "key":
        archs = parse_archs(options.arch, "--arch") if options.arch else settings.archs or ()
        major = loader.cuda_major()
        parts = [host_part(source_root), *(device_part(source_root, arch, major) for arch in archs if major)]
        print(hashlib.sha256(" ".join(sorted(part.key for part in parts)).encode()).hexdigest())
        return 0
    if options.action == "path":
        root, notes = choose(settings)
        for note in notes:
            say(note)
        if root is None:
            raise TejitError("no directory can hold compiled kernels", "set TEJIT_CACHE_DIR to one")
        print(root.path)
        return 0
    for root in roots(settings):
        if options.action == "list":
            _list(root)
        elif not root.prebuilt:
            removed = maintain.clear(root) if options.action == "clear" else maintain.trim(root, settings)
            for entry in removed:
                print(f"removed {entry.folder} ({entry.part}, {entry.size / 1e6:.1f} MB)")
    return 0


def _list(root: Root) -> None:
    for entry in maintain.entries(root):
        days = max(0.0, time.time() - entry.used) / 86400
        size = f"{entry.size / 1e6:6.1f} MB"
        print(f"{entry.part:9} {entry.builder:5} {size}, used {days:.1f} days ago, {entry.folder}")
