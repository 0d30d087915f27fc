"""Which compute capabilities this machine's GPUs have, asked without a CUDA context and remembered."""

from __future__ import annotations

import ctypes
import glob
import json
import os
from collections.abc import Iterable

from .roots import Root, Unusable, distrust_root, prepare

MEMORY = "gpus.json"


def identity() -> str | None:
    """What tells this machine's GPUs apart cheaply; None where there is none that a process could use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    folders = sorted(glob.glob("/proc/driver/nvidia/gpus/*"))
    # The PCI device number names the chip, and with it its compute capability, on every machine alike.
    models = {_first_line(f"/sys/bus/pci/devices/{os.path.basename(folder).lower()}/device") for folder in folders}
    if folders and None not in models:
        return "pci:" + ",".join(sorted(str(model) for model in models))
    names = {_model(folder) for folder in folders}
    if folders and None not in names:
        return "model:" + ",".join(sorted(str(name) for name in names))
    devices = sorted(glob.glob("/dev/nvidia[0-9]*")) + glob.glob("/dev/dxg") + glob.glob("/dev/nvhost-gpu")
    if devices:
        # Nothing names the chips: what was asked holds until the machine is started again.
        return f"boot:{_first_line('/proc/sys/kernel/random/boot_id')}:{','.join(devices)}"
    return None


def present(roots: Iterable[Root], *, remember: bool = True) -> tuple[int, ...]:
    """Compute capabilities (10 * major + minor) of the machine's GPUs, ascending.

    The answer of the driver's management library is remembered in the cache, as asking costs up to 0.1 s.
    """
    known_as = identity()
    if known_as is None:
        return ()
    places = list(roots)
    for root in places:
        known = _remembered(root).get(known_as)
        if known is not None:
            return tuple(known)
    found = query()
    if found and remember:
        _remember(places, known_as, found)
    return found


def query() -> tuple[int, ...]:
    """Ask NVML, which needs no CUDA context; () where it cannot be asked."""
    try:
        from cuda.bindings import nvml
    except Exception:
        return _query_library()
    try:
        nvml.init_v2()
        try:
            handles = [nvml.device_get_handle_by_index_v2(i) for i in range(nvml.device_get_count_v2())]
            pairs = {tuple(nvml.device_get_cuda_compute_capability(handle)) for handle in handles}
        finally:
            nvml.shutdown()
    except Exception:
        # No driver, a driver of another version than the library, a GPU that fell off: no GPU, for us.
        return ()
    return tuple(sorted(10 * int(major) + int(minor) for major, minor in pairs))


def _query_library() -> tuple[int, ...]:
    """The same question without `cuda.bindings.nvml`, which older releases of cuda-python lack."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return ()
    except (OSError, AttributeError):
        return ()
    found = set()
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
                continue
            ask = library.nvmlDeviceGetCudaComputeCapability
            if ask(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                found.add(10 * major.value + minor.value)
    finally:
        library.nvmlShutdown()
    return tuple(sorted(found))


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip() or None
    except OSError:
        return None


def _model(folder: str) -> str | None:
    try:
        with open(os.path.join(folder, "information"), encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Model:"):
                    return line.partition(":")[2].strip() or None
    except OSError:
        pass
    return None


def _remembered(root: Root) -> dict[str, list[int]]:
    try:
        if distrust_root(root) is not None:
            return {}
        with open(os.path.join(root.store, MEMORY), "rb") as file:
            note = json.loads(file.read(1 << 16))
    except (OSError, ValueError):
        return {}
    if not isinstance(note, dict):
        return {}
    return {
        name: ccs
        for name, ccs in note.items()
        if isinstance(ccs, list) and ccs and all(isinstance(cc, int) for cc in ccs)
    }


def _remember(roots: Iterable[Root], known_as: str, found: tuple[int, ...]) -> None:
    for root in roots:
        if root.prebuilt:
            continue
        try:
            prepare(root)
            note = {**_remembered(root), known_as: list(found)}
            new = os.path.join(root.store, f".{MEMORY}-{os.getpid()}-{os.urandom(4).hex()}")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                json.dump(note, file)
            os.replace(new, os.path.join(root.store, MEMORY))
        except (OSError, Unusable):
            # Forgetting costs the next import a query, nothing else.
            continue
        return
