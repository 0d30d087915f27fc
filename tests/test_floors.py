"""The house has floors, and imports point down: read from the source, so that no import order hides a breach."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tejit"

#: Rooms by module path; a room is everything at or below that path. The package's own names are the top floor.
FLOORS = {
    "tejit.jit": 0,
    "tejit.format_info": 1,
    "tejit.device": 1,
    "tejit.compat": 1,
    "tejit.refusals": 1,
    "tejit.traced_constants": 1,
    "tejit.kernels": 2,
    "tejit.tensor": 3,
    "tejit.dynamo": 4,
    "tejit.formats": 5,
    "tejit.recipe": 6,
    "tejit.ops": 6,
    "tejit.nn": 7,
    "tejit.convert": 8,
    "tejit.inspect": 8,
    "tejit.io": 8,
    "tejit.__main__": 9,
    "tejit": 9,
}

#: The files of floor 1 are one room of facts: they may know each other, in one direction.
FACTS = ("tejit.format_info", "tejit.device", "tejit.compat", "tejit.refusals", "tejit.traced_constants")

#: Imports that may stand inside a function: who, what (each with everything below it), and why.
LAZY = {
    ("tejit.jit", "torch"): "settings and the command line answer before torch, a second or more, is there",
    ("tejit.jit", "filelock"): "17 ms, needed on a miss only",
    ("tejit.jit", "cuda"): "cuda.bindings and cuda.pathfinder: 60-300 ms, needed on a miss only",
    ("tejit.jit", "ninja"): "needed on a miss only",
    ("tejit.jit.loader", "tejit.jit.build"): "the builder is needed on a miss only",
    ("tejit.jit.loader", "tejit.jit.errors"): "goes with the builder",
    ("tejit.jit.toolchain", "glob"): "the search for tools happens on a miss only",
    ("tejit.jit.build", "platform"): "only a manifest tells the machine",
    ("tejit.jit.info", "importlib.metadata"): "only a report tells versions",
    ("tejit.convert", "tejit.nn.conversion"): "brings all modules along, which only a conversion needs",
    ("tejit.recipe.context", "tejit.recipe.blocks"): "the default needs MXFP8 on one kind of GPU only",
    ("tejit.inspect.info", "tejit.jit.info"): "brings the builder along, which only a report needs",
    ("tejit.inspect.table", "html"): "tables of names, for notebooks only",
    ("tejit.compat", "torch"): "private places that another torch may lack are looked up where they are used",
    ("tejit.ops.transforms", "torch._functorch"): "only torch.vmap needs them",
    ("tejit.kernels.padding", "torch.fx.experimental.symbolic_shapes"): "loads sympy, needed while compiling only",
}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int
    in_function: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.importer} line {self.line} imports {self.imported}"


def modules_in(package: Path) -> dict[str, Path]:
    """Module names by dotted path, `__init__.py` under its package's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_in(package: Path) -> list[Import]:
    modules = modules_in(package)
    found = []
    for module, path in modules.items():
        inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node, in_function, for_types in _import_nodes(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            for imported in _targets(node, inside, modules):
                found.append(Import(module, imported, node.lineno, in_function, for_types))
    return found


def _import_nodes(
    node: ast.AST, in_function: bool = False, for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, in_function, for_types
        else:
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            types = isinstance(child, ast.If) and ast.unparse(child.test).split(".")[-1] == "TYPE_CHECKING"
            yield from _import_nodes(child, in_function or function, for_types or types)


def _targets(node: ast.Import | ast.ImportFrom, inside: str, modules: dict[str, Path]) -> list[str]:
    """The modules an import names: `from p import m` means p.m where that is a module of ours, else p."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parents = inside.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
    return sorted({name if (name := f"{base}.{alias.name}") in modules else base for alias in node.names})


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def room_of(module: str) -> str:
    rooms = [room for room in FLOORS if is_in(module, room) and (room != "tejit" or module == "tejit")]
    if not rooms:
        raise AssertionError(f"{module} stands on no floor: give it a row in FLOORS")
    return max(rooms, key=len)


def upward(imports: list[Import]) -> list[str]:
    """Imports of a room that is not below; what serves type checkers only counts too."""
    wrong = []
    for each in imports:
        if not is_in(each.imported, "tejit"):
            continue
        here, there = room_of(each.importer), room_of(each.imported)
        if here != there and not {here, there} <= {*FACTS} and FLOORS[there] >= FLOORS[here]:
            wrong.append(f"{each}: from floor {FLOORS[here]} to floor {FLOORS[there]}")
    return wrong


def cycles(imports: list[Import]) -> list[str]:
    """Chains of imports that come back to where they began, of those that run while a module is imported."""
    below: dict[str, list[str]] = {}
    for each in imports:
        if is_in(each.imported, "tejit") and not each.in_function and not each.for_types:
            below.setdefault(each.importer, []).append(each.imported)
    found: set[str] = set()
    finished: set[str] = set()

    def visit(module: str, chain: tuple[str, ...]) -> None:
        if module in chain:
            found.add(" -> ".join((*chain[chain.index(module) :], module)))
        elif module not in finished:
            for imported in below.get(module, []):
                visit(imported, (*chain, module))
            finished.add(module)

    for module in list(below):
        visit(module, ())
    return sorted(found)


def lazy_permissions(each: Import) -> list[tuple[str, str]]:
    return [(who, what) for who, what in LAZY if is_in(each.importer, who) and is_in(each.imported, what)]


def unlisted(imports: list[Import]) -> list[str]:
    return [str(each) for each in imports if each.in_function and not lazy_permissions(each)]


def test_imports_point_down() -> None:
    assert upward(imports_in(PACKAGE)) == []


def test_no_import_cycle() -> None:
    assert cycles(imports_in(PACKAGE)) == []


def test_imports_inside_functions_are_listed_with_their_reason() -> None:
    assert unlisted(imports_in(PACKAGE)) == []


def test_no_permission_outlives_its_use() -> None:
    used = {permission for each in imports_in(PACKAGE) if each.in_function for permission in lazy_permissions(each)}
    assert sorted(set(LAZY) - used) == []


def test_every_module_stands_on_a_floor() -> None:
    modules = modules_in(PACKAGE)
    assert "tejit.jit" in modules  # the package was found at all
    for module in modules:
        room_of(module)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A sound little house, for tests to plant a breach in."""
    package = tmp_path / "tejit"
    for name, text in {
        "__init__.py": "from tejit.nn import Linear\n",
        "format_info.py": "",
        "device.py": "from tejit import format_info\n",
        "recipe/__init__.py": "",
        "ops/__init__.py": "import tejit.kernels\n",
        "kernels/__init__.py": "from .gemm import gemm\n",
        "kernels/gemm.py": "from tejit import format_info\nfrom ..device import name\n",
        "nn/__init__.py": "from tejit.nn.linear import Linear\n",
        "nn/linear.py": "import torch\nimport tejit.kernels.gemm\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    imports = imports_in(package)
    assert len(imports) == 9
    assert upward(imports) + cycles(imports) + unlisted(imports) == []
    return package


@pytest.mark.parametrize(
    ("file", "line", "breach"),
    [
        ("kernels/gemm.py", "import tejit.nn.linear", "tejit.kernels.gemm line 3 imports tejit.nn.linear"),
        ("kernels/gemm.py", "from ..nn import linear", "tejit.kernels.gemm line 3 imports tejit.nn.linear"),
        ("kernels/gemm.py", "from tejit import Linear", "tejit.kernels.gemm line 3 imports tejit: from floor 2"),
        ("kernels/__init__.py", "from .. import nn", "tejit.kernels line 2 imports tejit.nn"),
        ("ops/__init__.py", "from tejit import recipe", "tejit.ops line 2 imports tejit.recipe: from floor 6"),
        ("device.py", "def f():\n  import tejit.kernels", "tejit.device line 3 imports tejit.kernels"),
        ("device.py", "if TYPE_CHECKING:\n  import tejit.nn", "tejit.device line 3 imports tejit.nn"),
        ("device.py", "try:\n  import tejit.nn\nexcept E: pass", "tejit.device line 3 imports tejit.nn"),
    ],
)
def test_a_planted_import_upward_is_found(house: Path, file: str, line: str, breach: str) -> None:
    with open(house / file, "a") as source:
        source.write(line + "\n")
    assert [breach in found for found in upward(imports_in(house))] == [True]


def test_a_planted_cycle_is_found(house: Path) -> None:
    (house / "kernels/helper.py").write_text("from tejit.kernels import gemm\n")
    (house / "kernels/gemm.py").write_text("from tejit.kernels.helper import x\n")
    expected = ["tejit.kernels.gemm -> tejit.kernels.helper -> tejit.kernels.gemm"]
    assert cycles(imports_in(house)) == expected
    (house / "kernels/gemm.py").write_text("if TYPE_CHECKING:\n  from tejit.kernels.helper import x\n")
    assert cycles(imports_in(house)) == []


def test_a_planted_import_inside_a_function_is_found(house: Path) -> None:
    (house / "nn/linear.py").write_text("class A:\n  def f(self):\n    if True:\n      import glob\n")
    assert unlisted(imports_in(house)) == ["tejit.nn.linear line 4 imports glob"]


def test_a_module_without_a_floor_is_found(house: Path) -> None:
    (house / "attic.py").write_text("import tejit.nn\n")
    with pytest.raises(AssertionError, match=r"tejit\.attic stands on no floor"):
        upward(imports_in(house))
