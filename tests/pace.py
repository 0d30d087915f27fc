"""Bars in seconds on a machine that others share.

The processors of CI are lent by the moment: the same import took 38 ms in the morning and 95 ms at noon, with nothing
else on the machine. So a peer, which is none of ours and never changes, is timed in the same minute, and where it takes
longer than it took on the day that the bar was met, the bar is longer by that factor. It is never shorter.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

#: Seconds that the peers took in the calm hour of 2026-11-30 in which commit 879c098 took 38 ms to import and 4.5 s to
#: build with NVRTC. Found from ratios to that commit, which are the same at any pace: import 0.52 to 0.56, build 2.6 to
#: 2.7 of the peer's time.
CALM_IMPORT = 0.070
CALM_NVRTC = 1.70

_IMPORT = """
import time
begin = time.perf_counter()
import argparse, asyncio, concurrent.futures, csv, ctypes.util, difflib, email.mime.text, fractions, http.server
import logging.config, multiprocessing.pool, optparse, pdb, plistlib, statistics, tarfile, tempfile, unittest.mock
import urllib.request, wsgiref.simple_server, xml.dom.minidom, xmlrpc.client, zipfile
print(time.perf_counter() - begin)
"""

_KERNEL = """
template <int N, typename T>
__device__ T step(T value, const T* table, int lane) {
  T sum = value;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    T next = table[(lane * N + i) & 1023];
    sum = sum > next ? sum * next + value : next / (sum * sum + T(i + 1));
    if (lane & (1 << (i & 15))) sum -= value * T(i);
    value += __shfl_xor_sync(0xffffffffu, static_cast<float>(sum), i & 31);
  }
  return sum;
}
#define KERNEL(N, T) \\
  extern "C" __global__ void kernel_##N##_##T(T* out, const T* in, int n) { \\
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < n; at += gridDim.x * blockDim.x) \\
      out[at] = step<N, T>(in[at], in, threadIdx.x) + step<N / 2, T>(out[at], in, at & 31); \\
  }
#define KERNELS(N) KERNEL(N, float) KERNEL(N, double) KERNEL(N, int)
KERNELS(24) KERNELS(28) KERNELS(32) KERNELS(36) KERNELS(40) KERNELS(44)
"""


def of_imports(rounds: int = 5) -> float:
    """By which factor imports are slower now, at least 1: modules of the standard library, in fresh interpreters."""
    return max(1.0, statistics.median(_import() for _ in range(rounds)) / CALM_IMPORT)


def _import() -> float:
    command, env = [sys.executable, "-I", "-c", _IMPORT], {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    return float(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout)


def of_nvrtc(rounds: int = 2) -> float:
    """By which factor NVRTC is slower now, at least 1: kernels of nobody's, on all processors."""
    return max(1.0, statistics.median(_compile() for _ in range(rounds)) / CALM_NVRTC)


def _compile() -> float:
    from cuda.bindings import nvrtc

    options = [b"--gpu-architecture=sm_90a", b"--split-compile=0", b"-std=c++17"]
    begin = time.perf_counter()
    _, program = nvrtc.nvrtcCreateProgram(_KERNEL.encode(), b"peer.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    taken = time.perf_counter() - begin
    assert int(status) == 0, status
    nvrtc.nvrtcDestroyProgram(program)
    return taken
