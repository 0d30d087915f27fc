"""Find a compiler, build the kernels, cache them, load them. Knows nothing of tensors.

`import tejit` calls `load()` once. Everything here reads TEJIT_* from the environment; see docs/cache.md.
"""

from __future__ import annotations

from .errors import CacheError, CompileError, KernelNotCached, TejitError, ToolchainError
from .loader import ensure_arch, ensure_host, host_error, host_pending, is_loaded, load, warm
from .settings import ARCHS, Settings, is_command_line, parse_archs, read_settings

__all__ = [
    "ARCHS",
    "CacheError",
    "CompileError",
    "KernelNotCached",
    "Settings",
    "TejitError",
    "ToolchainError",
    "ensure_arch",
    "ensure_host",
    "host_error",
    "host_pending",
    "is_command_line",
    "is_loaded",
    "load",
    "parse_archs",
    "read_settings",
    "warm",
]
