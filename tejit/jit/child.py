"""Run by path in a process of its own: compile one part, with torch's load_inline (or load) or with NVRTC.

Argument: the path of a JSON request (see workspace.py). Standard library only, until the parent's search path
is set.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import os
import shutil
import signal
import sys
import threading
import types
from typing import Any


def _leave_with_parent(folder: str) -> None:
    """When the parent is gone its end of the pipe closes: end the whole session, leave nothing behind."""
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                session = int(file.read().rpartition(b")")[2].split()[3])
            if session == own:
                os.kill(int(name), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            continue
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(own, signal.SIGKILL)


def _cpp_extension() -> Any:
    """torch.utils.cpp_extension, without torch's libraries: to load them takes as long as a compiler runs."""
    try:
        _stand_in_for_torch()
        return importlib.import_module("torch.utils.cpp_extension")
    except Exception:
        # A release of torch that wants more of itself: all of it.
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        return importlib.import_module("torch.utils.cpp_extension")


def _stand_in_for_torch() -> None:
    """Modules of torch that hold no more than what torch.utils.cpp_extension asks of them while it compiles."""
    for name in ("torch", "torch.utils"):
        parent = sys.modules.get(name.rpartition(".")[0])
        spec = importlib.machinery.PathFinder.find_spec(name, parent.__path__ if parent else sys.path)
        assert spec is not None
        package = sys.modules[name] = types.ModuleType(name)
        package.__spec__, package.__file__, package.__path__ = spec, spec.origin, spec.submodule_search_locations or []
    torch: Any = sys.modules["torch"]
    torch.version = importlib.import_module("torch.version")
    torch.__version__ = torch.version.__version__
    torch.utils = sys.modules["torch.utils"]
    compiled = torch.version.cuda is not None or torch.version.hip is not None
    torch.cuda = types.SimpleNamespace(is_available=lambda: True, _is_compiled=lambda: compiled)
    torch.xpu = types.SimpleNamespace(_is_compiled=lambda: False)
    # The library is loaded by the process that wants it.
    torch.ops = types.SimpleNamespace(load_library=lambda path: None)
    # From 2.14 on: who counts how long a lock was waited for, and who profiles the compiler of graphs.
    _module("torch.monitor", _WaitCounter=_Uncounted)
    _module("torch._strobelight")
    _module("torch._strobelight.compile_time_profiler", StrobelightCompileTimeProfiler=None)


def _module(name: str, **contents: Any) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(contents)


class _Uncounted:
    def __init__(self, *words: Any) -> None:
        pass

    def guard(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


def _load_inline(request: dict[str, Any]) -> None:
    cpp_extension = _cpp_extension()
    torch = sys.modules["torch"]
    torch_link = request["torch_link"]
    if torch_link:
        # torch does not quote these two for the linker; the link has a plain name.
        cpp_extension.TORCH_LIB_PATH = os.path.join(torch_link, "lib")
        cpp_extension._TORCH_PATH = torch_link
    if hasattr(cpp_extension, "remove_extension_h_precompiler_headers"):
        # load_inline would delete precompiled headers of torch that others made for themselves.
        cpp_extension.remove_extension_h_precompiler_headers = lambda: None

    whole = hasattr(torch, "_C")
    print(f"torch {torch.__version__}{'' if whole else ' (headers)'}, python {sys.version.split()[0]}", flush=True)
    units, folder = request["units"], os.path.dirname(request["built"])
    cuda = request["builder"] == "nvcc"
    options: dict[str, Any] = {
        "name": request["name"],
        "extra_cflags": request["cflags"],
        "extra_cuda_cflags": request["cuda_cflags"],
        "extra_ldflags": request["ldflags"],
        "extra_include_paths": request["include"],
        "build_directory": folder,
        "with_cuda": cuda,
        "is_python_module": False,
        "verbose": True,
    }
    if len(units) == 1:
        cpp_extension.load_inline(
            cpp_sources=[""] if cuda else units,
            cuda_sources=units if cuda else None,
            no_implicit_headers=True,
            **options,
        )
        return
    # load_inline makes one unit of all its sources. Its sibling takes files, which ninja compiles side by side.
    sources = [os.path.join(folder, f"unit{number}{'.cu' if cuda else '.cpp'}") for number in range(len(units))]
    for path, text in zip(sources, units, strict=True):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    cpp_extension.load(sources=sources, **options)


def _nvrtc(request: dict[str, Any]) -> int:
    from cuda.bindings import nvrtc

    def checked(answer: Any) -> Any:
        if int(answer[0]):
            raise RuntimeError(f"NVRTC error: {nvrtc.nvrtcGetErrorString(answer[0])[1].decode()}")
        return answer[-1]

    options = [option.encode() for option in request["options"]]
    print("nvrtc", *request["options"], flush=True)
    # Its name must be none that it includes.
    program = checked(nvrtc.nvrtcCreateProgram(request["units"][0].encode(), b"tejit_unit.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    print(log.decode("utf-8", "replace").rstrip("\0"), flush=True)
    if int(status):
        return 1
    cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    with open(request["built"], "wb") as file:
        file.write(cubin)
    return 0


def main(request_path: str) -> int:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    threading.Thread(target=_leave_with_parent, args=(request["folder"],), daemon=True).start()
    sys.path[:] = request["sys_path"]
    if request["builder"] == "nvrtc":
        return _nvrtc(request)
    _load_inline(request)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
