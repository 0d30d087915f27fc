"""What is shipped: the wheel carries the sources it compiles, the sdist makes that wheel, an editable install works."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def files_below(folder: str) -> set[str]:
    """The files that belong to the project below a folder, by path from the root."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in paths if path.suffix != ".pyc"}


def run(*command: str | Path, **environment: str) -> str:
    env = os.environ | environment
    result = subprocess.run(list(map(str, command)), env=env, cwd=ROOT.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the build backend, which sees this one's packages but can be installed into."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = folder / scripts / "python"
    run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.24", "editables")
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(own, "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def build(python: Path, source: Path, target: str, out: Path) -> Path:
    code = "import os, sys; os.chdir(sys.argv.pop(1)); from hatchling.cli import hatchling; hatchling()"
    run(python, "-c", code, source, "build", "-t", target, "-d", out)
    (made,) = out.iterdir()
    return made


@pytest.mark.full
def test_wheel_holds_the_package_and_its_sources(python: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(python, ROOT, "wheel", tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    sources = {name.replace("cuda_src/", "tejit/_cuda_src/", 1) for name in files_below("cuda_src")}
    assert {"tejit/_cuda_src/host.cpp", "tejit/_cuda_src/device.cu", "tejit/_cuda_src/TEJIT_SOURCES"} <= sources
    assert "tejit/py.typed" in names
    assert names == files_below("tejit") | sources
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "Provides-Extra: nvcc" in metadata


@pytest.mark.full
def test_sdist_makes_the_same_wheel(python: Path, tmp_path: Path) -> None:
    sdist = build(python, ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name in ("tox.ini", ".ci/run", "LICENSE", "examples/train_lm.py", "tests/test_package.py", "CHANGELOG.md"):
        assert (unpacked / name).is_file(), name
    assert not (unpacked / ".git").exists()
    wheels = [build(python, source, "wheel", tmp_path / name) for name, source in (("one", ROOT), ("two", unpacked))]
    contents = [
        {entry.filename: entry.CRC for entry in zipfile.ZipFile(wheel).infolist() if "/RECORD" not in entry.filename}
        for wheel in wheels
    ]
    assert contents[0] == contents[1]


@pytest.mark.full
def test_editable_install_compiles_from_the_checkout(python: Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    code = "import tejit; from tejit.jit.sources import default_root; print(tejit.__file__, default_root(), sep='\\n')"
    package, sources = run(python, "-c", code, TEJIT_BACKEND="torch").splitlines()
    assert Path(package) == ROOT / "tejit" / "__init__.py"
    assert Path(sources) == ROOT / "cuda_src"


def test_one_version_is_told_everywhere() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib starts with Python 3.11")
    import tomllib

    import tejit

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tejit.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
