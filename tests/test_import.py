"""`import tejit`: how long it takes, and what it does on a machine without tools."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pace

ROOT = Path(__file__).parents[1]


def python(code: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that writes .pyc files; a change to None removes a variable."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **{k: v for k, v in changes.items() if v is not None}}
    for name in (name for name, value in changes.items() if value is None):
        env.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )


TIMED = """
import time, torch
begin = time.perf_counter()
import tejit
end = time.perf_counter()
assert tejit.jit.is_loaded(), tejit.jit.host_error()
print(1e3 * (end - begin))
"""


@pytest.mark.perf
def test_a_warm_import_takes_less_than_50_ms_after_torch(need_kernels, capsys) -> None:
    need_kernels("cpu")
    python(TIMED)  # writes the .pyc files
    taken = bar = 0.0
    for _ in range(5):  # one round in a few is disturbed
        taken = statistics.median(float(python(TIMED).stdout) for _ in range(9))
        bar = 50 * pace.of_imports()
        if taken < bar:
            break
    with capsys.disabled():
        print(f"\nimport tejit after torch: {taken:.1f} ms; the bar of 50 ms is {bar:.1f} at this machine's pace")
    assert taken < bar


USED = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, tejit
ours = [str(w.message) for w in caught if "tejit" in str(w.message) or "kernel" in str(w.message)]
assert len(ours) == 1, ours
assert not tejit.jit.is_loaded()
layer = tejit.Linear(64, 64)
x = torch.randn(8, 64, requires_grad=True)
with tejit.autocast():
    layer(x).sum().backward()
assert x.grad.isfinite().all() and layer.weight.grad.isfinite().all()
try:
    with tejit.backend("kernels"):
        tejit.Float8CurrentScalingQuantizer()(x)
except tejit.TejitError as error:
    print(ours[0])
    print(error)
"""


@pytest.mark.jit
def test_without_a_compiler_one_warning_is_said_and_the_reference_computes(tmp_path) -> None:
    done = python(
        USED,
        PATH=str(tmp_path),
        TEJIT_CACHE_DIR=str(tmp_path / "cache"),
        TEJIT_COMPILE=None,
        CXX=None,
        CUDA_HOME=None,
        CUDA_PATH=None,
        CUDA_VISIBLE_DEVICES="",
    )
    assert "g++" in done.stdout
    assert done.stderr == ""


def test_the_torch_backend_builds_and_loads_nothing(tmp_path) -> None:
    code = "import tejit; print(tejit.jit.is_loaded())"
    done = python(code, TEJIT_BACKEND="torch", TEJIT_CACHE_DIR=str(tmp_path / "cache"))
    assert done.stdout.strip() == "False"
    assert done.stderr == ""
    assert not (tmp_path / "cache").exists()


def test_an_unknown_backend_is_an_error_that_names_it() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python("import tejit", TEJIT_BACKEND="cuda")
    assert "ValueError" in caught.value.stderr
    assert "'cuda'" in caught.value.stderr
    assert "auto" in caught.value.stderr


def test_public_names_are_there() -> None:
    import tejit

    assert tejit.__version__
    for package in (tejit, tejit.recipe, tejit.nn, tejit.ops):
        assert set(package.__all__) <= set(dir(package))
        for name in package.__all__:
            assert hasattr(package, name), name
    with pytest.raises(AttributeError, match="'tejit' has no attribute 'Linaer'"):
        _ = tejit.Linaer


def test_every_quantizer_of_the_package_is_registered_by_the_import() -> None:
    """Files name quantizers, and reading one imports nothing."""
    code = """
import importlib, pkgutil, tejit
from tejit.tensor import Quantizer
def known(cls=Quantizer):
    return {cls}.union(*map(known, cls.__subclasses__()))
before = known()
for module in pkgutil.walk_packages(tejit.__path__, "tejit."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert known() == before, known() - before
"""
    done = python(code, TEJIT_BACKEND="torch")
    assert done.stderr == ""


LATE = """
import sys, torch, tejit
names = set(dir(tejit)), set(dir(tejit.recipe))
assert {"Linear", "nn", "inspect", "quantized_model_init"} <= names[0] and "DelayedScaling" in names[1]
assert not [name for name in sys.modules if name.startswith(("tejit.nn", "tejit.inspect"))]

@torch.compile(backend="eager", fullgraph=True)
def run(module, x):  # the first to ask for a name may be TorchDynamo
    return x if isinstance(module, tejit.Linear) else module(x)

assert run(torch.nn.Linear(4, 3), torch.ones(2, 4)).shape == (2, 3)
assert tejit.recipe.delayed.DelayedScaling is tejit.recipe.DelayedScaling and "register" in dir(tejit.ops)
assert tejit.nn.grouped.GroupedLinear is tejit.GroupedLinear
assert tejit.nn.init and tejit.ops.register.register_quantized_op and not hasattr(tejit, "nn.init")
assert tejit.nn.Linear is tejit.Linear and tejit.inspect.explain is tejit.explain
layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
import tejit.convert  # the module of that name must not hide the function
assert type(tejit.convert(layer, filter_fn=lambda module, name: True)[0]) is tejit.Linear
import pydoc
assert "class TransformerLayer" in pydoc.plain(pydoc.render_doc(tejit))
"""


def test_names_that_few_processes_use_come_when_they_are_asked_for() -> None:
    done = python(LATE, TEJIT_BACKEND="torch")
    assert done.stderr == ""


def test_threads_may_be_the_first_to_ask_together() -> None:
    """Each thread that waits for a module holds those that it came through."""
    code = """
import os, sys, threading, torch, tejit
ASKED = (
    "tejit.Linear", "tejit.TransformerLayer", "tejit.explain", "tejit.nn.plain_state_dict",
    "tejit.recipe.DelayedScaling", "from tejit.recipe.delayed import DelayedScaling",
    "import tejit.nn", "import tejit.nn.linear", "import tejit.nn.norms", "import tejit.nn.conversion",
    "import tejit.inspect", "from tejit.ops import register_quantized_op",
)
def run():
    failed, start = [], threading.Barrier(len(ASKED))
    def ask(code):
        start.wait()
        try:
            exec(code, {"tejit": tejit})
        except BaseException as error:
            failed.append((code, repr(error)))
    threads = [threading.Thread(target=ask, args=(code,)) for code in ASKED]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(*failed, sep="\\n", flush=True)
    return bool(failed)
sys.setswitchinterval(1e-6)
for _ in range(5):
    if not (child := os.fork()):
        os._exit(run())
    assert os.waitpid(child, 0)[1] == 0
"""
    done = python(code, TEJIT_BACKEND="torch")
    assert not done.stdout.split()


def test_names_that_come_late_hide_no_misspelt_ones_from_type_checkers() -> None:
    """A checker that sees a module's ``__getattr__`` takes any name for one of its own."""
    packages = [path for path in ROOT.glob("tejit/**/__init__.py") if "late_names(" in path.read_text("utf-8")]
    assert packages
    for path in packages:
        tops = [ast.unparse(node) for node in ast.parse(path.read_text("utf-8")).body]
        assert [top.startswith("if not TYPE_CHECKING:") for top in tops if "late_names(" in top] == [True], path
