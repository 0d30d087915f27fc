"""The parts of the extension and the key that names each in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cached_property
from typing import Any, NamedTuple

from .settings import cc_of
from .sources import SourceSet, collect

SCHEMA = 1
HOST = "host"
# The oldest torch whose stable ABI the host part may use (2.11).
TORCH_TARGET_VERSION = "0x020b000000000000"

_LEVEL_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DTEJIT_CPU_AVX2"),
    "AVX512": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-DTEJIT_CPU_AVX512",
    ),
}
_HOST_FLAGS = (
    "-O2",
    "-std=c++17",
    "-ffp-contract=off",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
    "-DUSE_CUDA",
)
_DEVICE_FLAGS = ("-O3", "-std=c++17")


class _Part(NamedTuple):
    name: str  # "host" or "sm_90a"
    label: str  # as it is said to people: "cpu-avx512", "sm_90a"
    sources: SourceSet
    flags: tuple[str, ...]
    arch: str | None = None  # "90a"; None for the host part
    level: str | None = None  # "AVX512"; None for an architecture part
    cuda_major: str | None = None


class Part(_Part):
    """What is built, cached and loaded on its own: the host part, or the kernels of one architecture."""

    @property
    def is_host(self) -> bool:
        return self.arch is None

    @property
    def cc(self) -> int:
        """Compute capability of an architecture part (10 * major + minor)."""
        assert self.arch is not None
        return cc_of(self.arch)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything the binary depends on, and nothing that needs a compiler to be run."""
        facts: dict[str, Any] = {
            "schema": SCHEMA,
            "sources": self.sources.digest,
            "part": self.name,
            "flags": list(self.flags),
            "torch_target_version": TORCH_TARGET_VERSION,
            "machine": os.uname().machine,
            "glibc": _glibc(),
        }
        if self.is_host:
            facts["level"] = self.level
        else:
            facts["cuda_major"] = self.cuda_major
        return facts

    @cached_property
    def key(self) -> str:
        """Name of the cache entry: sha256 of the canonical JSON of `identity`."""
        text = json.dumps(self.identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def host_part(root: str) -> Part:
    """The host part for this machine's instruction level."""
    level = _level()
    return Part(
        name=HOST,
        label=f"cpu-{level.lower()}",
        sources=collect(root, "host.cpp"),
        flags=_HOST_FLAGS + _LEVEL_FLAGS.get(level, ()),
        level=level,
    )


def device_part(root: str, arch: str, cuda_major: str) -> Part:
    """The kernels for one architecture, such as "90a", of a CUDA major version."""
    return Part(
        name=f"sm_{arch}",
        label=f"sm_{arch}",
        sources=collect(root, "device.cu"),
        flags=(*_DEVICE_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"),
        arch=arch,
        cuda_major=cuda_major,
    )


def _level() -> str:
    import torch

    # Only x86-64 has levels to choose from here; what torch calls them elsewhere is one plain build.
    level = torch.backends.cpu.get_cpu_capability()
    return level if os.uname().machine == "x86_64" and level in _LEVEL_FLAGS else "default"


def _glibc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError):
        return sys.platform
