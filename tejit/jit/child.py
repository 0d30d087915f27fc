"""Run by path in a process of its own: compile one part with torch's load_inline.

Argument: the path of a JSON request (see workspace.py). Standard library only, until the parent's search path
is set.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading


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


def main(request_path: str) -> int:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    threading.Thread(target=_leave_with_parent, args=(request["folder"],), daemon=True).start()
    sys.path[:] = request["sys_path"]

    import torch
    from torch.utils import cpp_extension

    torch_link = request["torch_link"]
    if torch_link:
        # torch does not quote these two for the linker; the link has a plain name.
        cpp_extension.TORCH_LIB_PATH = os.path.join(torch_link, "lib")
        cpp_extension._TORCH_PATH = torch_link
    if hasattr(cpp_extension, "remove_extension_h_precompiler_headers"):
        # load_inline would delete precompiled headers of torch that others made for themselves.
        cpp_extension.remove_extension_h_precompiler_headers = lambda: None

    print(f"torch {torch.__version__}, python {sys.version.split()[0]}", flush=True)
    cuda = request["unit"] if request["cuda"] else None
    cpp_extension.load_inline(
        name=request["name"],
        cpp_sources=[""] if request["cuda"] else [request["unit"]],
        cuda_sources=[cuda] if cuda else None,
        extra_cflags=request["cflags"],
        extra_cuda_cflags=request["cuda_cflags"],
        extra_ldflags=request["ldflags"],
        extra_include_paths=request["include"],
        build_directory=request["output"],
        with_cuda=request["cuda"],
        is_python_module=False,
        no_implicit_headers=True,
        verbose=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
