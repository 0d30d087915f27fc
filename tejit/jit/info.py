"""What `python -m tejit info` and `tejit.info()` tell about the kernels: tools, GPUs, directories, parts."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from . import gpus, interpreter, loader, maintain, toolchain
from .build import Toolchain
from .cache import find
from .errors import TejitError
from .nvrtc import find_nvrtc
from .parts import Part, device_part, host_part
from .roots import distrust_root, roots
from .settings import ARCHS, Settings, arch_of, read_settings
from .sources import default_root


def _try(ask: Callable[[], Any]) -> Any:
    """An answer, or what stands against it in words: this report is for machines on which things fail."""
    try:
        return ask()
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _settings() -> tuple[Settings, str | None]:
    try:
        return read_settings(), None
    except Exception as error:
        return Settings(), str(error)


def collect(sources: str | None = None) -> dict[str, Any]:
    """Facts as plain values that JSON can hold. Never raises; reads, and asks compilers for their version."""
    settings, wrong = _settings()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("TEJIT_")},
        "settings_error": wrong,
        **_try(_torch),
        "loaded": loader.loaded_path(),
        "host_error": str(loader.host_error()) if loader.host_error() else None,
    }
    if not sys.platform.startswith("linux"):
        report["host_error"] = report["host_error"] or f"kernels are compiled on Linux only, this is {sys.platform}"
        return report
    report["gpus"] = _try(lambda: _gpus(settings))
    report["tools"] = _try(lambda: _tools(settings))
    report["directories"] = _try(lambda: _directories(settings))
    report["parts"] = _try(lambda: _parts(settings, sources or default_root()))
    report["missing"] = _try(lambda: _missing(settings))
    return report


def _torch() -> dict[str, Any]:
    import torch

    return {
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _gpus(settings: Settings) -> list[dict[str, Any]]:
    found = gpus.present(roots(settings), remember=False)
    return [{"compute_capability": f"{cc // 10}.{cc % 10}", "architecture": arch_of(cc)} for cc in found]


def _tools(settings: Settings) -> dict[str, Any]:
    nvcc = _try(lambda: toolchain.find_nvcc(settings))
    tools: dict[str, Any] = {
        "interpreter": _try(interpreter.find),
        "host_compiler": _try(lambda: _compiler(toolchain.find_host_compiler(settings))),
        "nvcc": nvcc,
        "ninja": _try(toolchain.find_ninja),
        "filelock": _try(_filelock),
    }
    if nvcc is None:
        import torch

        tools["nvrtc"] = _try(lambda: find_nvrtc(str(torch.version.cuda)).version) if torch.version.cuda else None
    if isinstance(nvcc, toolchain.Nvcc):
        tools["nvcc"] = {"version": nvcc.version, "path": nvcc.path, "root": nvcc.root}
        tools["nvcc_host_compiler"] = _try(lambda: _compiler(toolchain.find_host_compiler(settings, nvcc)))
    return tools


def _missing(settings: Settings) -> list[str]:
    """What a build here would fail for, and how to get it."""
    import torch

    tools = Toolchain(settings)
    asks: list[Callable[[], Any]] = [interpreter.find, tools.host, tools.ninja]
    major = (torch.version.cuda or "").split(".")[0]
    if major:
        # Without a GPU one that every toolkit knows stands for all.
        for arch in _archs(settings, major) or ARCHS[:1]:
            asks.append(functools.partial(tools.device, arch))
    found = []
    for ask in asks:
        try:
            ask()
        except TejitError as error:
            found.append(f"{error.what}; {error.todo}")
    return list(dict.fromkeys(found))


def _compiler(compiler: toolchain.Compiler) -> dict[str, str]:
    return {"version": str(compiler), "command": " ".join(compiler.command)}


def _filelock() -> str:
    import importlib.metadata

    return importlib.metadata.version("filelock")


def _directories(settings: Settings) -> list[dict[str, Any]]:
    return [
        {
            "path": root.path,
            "from": root.origin,
            "exists": os.path.isdir(root.path),
            "refused": distrust_root(root),
            "entries": len(listed := maintain.entries(root)),
            "bytes": sum(entry.size for entry in listed),
        }
        for root in roots(settings)
    ]


def _parts(settings: Settings, source_root: str) -> list[dict[str, Any]]:
    import torch

    major = (torch.version.cuda or "").split(".")[0]
    archs = _archs(settings, major)
    parts = [host_part(source_root), *(device_part(source_root, arch, major) for arch in archs)]
    return [_part(part, settings) for part in parts]


def _archs(settings: Settings, cuda_major: str) -> tuple[str, ...]:
    if not cuda_major:
        return ()
    if settings.archs is not None:
        return settings.archs
    present = gpus.present(roots(settings), remember=False)
    return tuple(arch for arch in map(arch_of, present) if arch is not None)


def _part(part: Part, settings: Settings) -> dict[str, Any]:
    facts: dict[str, Any] = {"part": part.name, "label": part.label, "key": part.key}
    try:
        found = find(roots(settings), part)
    except TejitError as error:
        return {**facts, "state": "unknown", "reason": str(error)}
    if found.entry is not None:
        manifest = found.entry.manifest
        tools = {name: manifest.get(name) for name in ("builder", "toolkit", "compiler", "torch")}
        return {**facts, "state": "cached", "file": found.entry.file, **tools}
    if found.damaged:
        return {**facts, "state": "damaged", "reason": "; ".join(": ".join(pair) for pair in found.damaged)}
    return {**facts, "state": "missing"}


def as_text(report: dict[str, Any]) -> str:
    """The report as indented lines."""
    lines: list[str] = []
    _lines(report, 0, lines)
    return "\n".join(lines)


def _lines(value: Any, depth: int, lines: list[str]) -> None:
    indent = "  " * depth
    for name, item in value.items():
        if isinstance(item, dict) and item:
            lines.append(f"{indent}{name}:")
            _lines(item, depth + 1, lines)
        elif isinstance(item, list) and item:
            lines.append(f"{indent}{name}:")
            for one in item:
                words = [f"{key} {_word(text)}" for key, text in one.items()] if isinstance(one, dict) else [one]
                lines.append(f"{indent}  - {', '.join(words)}")
        else:
            lines.append(f"{indent}{name}: {_word(item)}")


def _word(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).replace("\n", " / ")
