"""Imports point one way: core, then adapters (torch on kernels), then experiments, then the command line.

The graph has every import statement of the package, those inside functions too. It is read, not executed.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "bitempered"

# The rooms (files and folders of the package) from the bottom up, each with those that it imports: none that it need
# not. Inside a room all imports but cycles are allowed, and every room may import the package's own __init__, which has
# the version.
ADAPTER = {"core", "checks", "encoding"}
ROOMS = {
    "core": set(),
    "pushforward": {"core"},
    "checks": set(),
    "extras": set(),
    "encoding": {"core", "checks"},
    "noise": set(),
    "schedules": {"checks"},
    "diagnosis": set(),
    "tune": set(),
    "audit": {"checks", "extras"},
    "kernels": {"checks", "core"},
    "torch": ADAPTER | {"extras", "kernels", "pushforward"},
    "jax": ADAPTER | {"extras", "pushforward"},
    "keras": ADAPTER | {"extras"},
    "numpy": ADAPTER,
    "sklearn": ADAPTER | {"diagnosis", "extras", "schedules"},
    "boosting": ADAPTER,
    "divergences": ADAPTER,
    "experiments": {"audit", "core", "diagnosis", "extras", "kernels", "noise", "schedules"}
    | {"sklearn", "torch", "tune"},
    "playground": {"checks", "noise", "schedules", "torch"},
    "cli": {"experiments", "extras", "playground"},
    "__main__": {"cli"},
}
# Imports against the rule that are needed, each with its reason.
EXCEPTIONS = {
    ("boosting", "numpy"): "xgboost and lightgbm call objectives with NumPy arrays",
    ("sklearn", "numpy"): "its estimators compute with NumPy",
    ("divergences", "numpy"): "it finds the adapter of the array that it is given",
    ("divergences", "torch"): "it finds the adapter of the array that it is given",
    ("divergences", "jax"): "it finds the adapter of the array that it is given",
}


def modules_of(source):
    """Every module of a package by its dotted name, with its file."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = (source.name, *path.relative_to(source).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name, path, modules):
    """Those of `modules` that a module imports, anywhere in its code.

    Their names in strings count too, since `import_module` and its relatives take them: whole, or up to a dot. A name
    that starts with `__name__` or `__package__` may be that of any module in the folder.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    inside = [x for x in modules if x.startswith(f"{package}.")]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = relative(node.module or "", node.level, package)
            named = [x if x in modules else base for x in (f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            named = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            text = node.value.lstrip(".")
            text = relative(text, len(node.value) - len(text), package) if text else ""
            named = [x for x in modules if x.startswith(text)] if text.endswith(".") else [text]
        elif isinstance(node, (ast.JoinedStr, ast.BinOp)):
            used = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
            said = "".join(x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str))
            named = inside if used & {"__name__", "__package__"} and " " not in said else []
        else:
            continue
        found.update(x for x in named if x in modules)
    for other in tuple(found):  # importing a module imports the packages that it is in
        parents = (other[:at] for at, letter in enumerate(other) if letter == ".")
        found.update(x for x in parents if x in modules and not f"{name}.".startswith(f"{x}."))
    return found - {name}


def relative(text, level, package):
    """The dotted name that a module of `package` gives with so many dots before it."""
    above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
    return ".".join([*above, *([text] if text else [])])


def graph_of(source):
    modules = modules_of(source)
    return {name: imports_of(name, path, modules) for name, path in modules.items()}


def cycle_in(graph):
    """One cycle of imports as a list of modules, the first again at the end; None if there is none."""
    done = set()

    def visit(name, above):
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return None
        for other in sorted(graph[name]):
            cycle = visit(other, [*above, name])
            if cycle:
                return cycle
        done.add(name)
        return None

    return next(filter(None, (visit(name, []) for name in sorted(graph))), None)


def room_of(module):
    return module.split(".")[1] if "." in module else None


def edges_between_rooms(graph):
    """(importing room, imported room) -> an import statement's two modules."""
    pairs = [(module, other) for module, others in sorted(graph.items()) for other in sorted(others)]
    rooms = {(room_of(module), room_of(other)): f"{module} imports {other}" for module, other in reversed(pairs)}
    return {(a, b): said for (a, b), said in rooms.items() if a != b and b is not None}


def wrong_imports(graph, rooms, exceptions):
    return sorted(
        said
        for (a, b), said in edges_between_rooms(graph).items()
        if b not in rooms.get(a, set()) and (a, b) not in exceptions
    )


def test_no_cycle():
    assert cycle_in(graph_of(SOURCE)) is None


def test_no_room_imports_one_above_it():
    assert wrong_imports(graph_of(SOURCE), ROOMS, EXCEPTIONS) == []


def test_every_module_has_a_room():
    rooms = {room_of(module) for module in modules_of(SOURCE)} - {None}
    assert rooms <= set(ROOMS)


def unused_permissions(graph, rooms, exceptions):
    allowed = {(room, other) for room, others in rooms.items() for other in others} | set(exceptions)
    return sorted(allowed - set(edges_between_rooms(graph)))


def test_no_permission_is_left_over():
    assert unused_permissions(graph_of(SOURCE), ROOMS, EXCEPTIONS) == []


def imports_among_tests(folder):
    """The test modules of a folder that import another: what they share belongs in a module of cases."""
    modules = {path.stem: path for path in folder.glob("*.py")}
    edges = ((name, imports_of(name, path, modules)) for name, path in sorted(modules.items()))
    return [
        f"{name} imports {other}" for name, others in edges for other in sorted(others) if other.startswith("test_")
    ]


@pytest.mark.parametrize("folder", ["tests", "tests_gpu"])
def test_no_test_module_imports_another(folder):
    assert imports_among_tests(SOURCE.parents[1] / folder) == []


@pytest.mark.parametrize("code", ["import test_a\n", "from test_a import x\n", "def f():\n    import test_a as x\n"])
def test_an_import_of_another_test_module_is_found(tmp_path, code):
    (tmp_path / "test_a.py").write_text("import cases\n")
    (tmp_path / "test_b.py").write_text(code)
    (tmp_path / "cases.py").write_text("x = 1\n")
    assert imports_among_tests(tmp_path) == ["test_b imports test_a"]


@pytest.fixture
def package(tmp_path):
    """A small package in good order: the command line imports torch, which imports kernels and core."""
    files = {
        "__init__": "",
        "core": "import math\n",
        "kernels/__init__": "from small.kernels import fast\n",
        "kernels/fast": "from .options import Options\n",
        "kernels/options": "Options = tuple\n",
        "torch/__init__": "from small.torch.loss import loss\n",
        "torch/loss": "def loss():\n    from small import core, kernels\n",
        "cli": "import small.torch\nfrom small import __version__\n",
    }
    root = tmp_path / "small"
    for name, code in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return root


SMALL_ROOMS = {"core": set(), "kernels": set(), "torch": {"core", "kernels"}, "cli": {"torch"}}


def test_a_package_in_good_order_passes(package):
    graph = graph_of(package)
    assert graph["small.torch.loss"] == {"small.core", "small.kernels"}
    assert graph["small.kernels.fast"] == {"small.kernels.options"}
    assert graph["small.cli"] == {"small", "small.torch"}
    assert cycle_in(graph) is None
    assert wrong_imports(graph, SMALL_ROOMS, {}) == []
    assert unused_permissions(graph, SMALL_ROOMS, {}) == []


def test_a_permission_that_no_import_uses_is_found(package):
    (package / "cli.py").write_text("")
    assert unused_permissions(graph_of(package), SMALL_ROOMS, {("core", "cli"): "a reason"}) == [
        ("cli", "torch"),
        ("core", "cli"),
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import small.torch.loss\n",
        "from small.torch import loss\n",
        "from ..torch.loss import loss\n",
        "def f():\n    from small.torch.loss import loss\n",
        "try:\n    pass\nfinally:\n    class A:\n        import small.torch.loss as x\n",
        "import importlib\nx = importlib.import_module('small.torch.loss')\n",
        "from importlib import import_module as load\nx = load('..torch.loss', __package__)\n",
        "x = __import__('small.torch.loss')\n",
        "from importlib import import_module\nTABLE = {'x': 'small.torch.loss'}\nx = import_module(TABLE['x'])\n",
        "from importlib import import_module\ndef f(name):\n    return import_module(f'small.torch.{name}')\n",
        "from importlib import import_module\ndef f(name):\n    return import_module('small.torch.' + name)\n",
        "import small\ndef f():\n    return small.torch.loss.loss()\n",
    ],
)
def test_an_import_back_is_found_wherever_it_stands(package, code):
    (package / "kernels" / "options.py").write_text(code)
    graph = graph_of(package)
    cycle = cycle_in(graph)
    assert cycle is not None
    assert cycle[0] == cycle[-1]
    assert {"small.kernels.options", "small.torch.loss"} <= set(cycle)
    assert wrong_imports(graph, SMALL_ROOMS, {}) == ["small.kernels.options imports small.torch"]
    assert wrong_imports(graph, SMALL_ROOMS, {("kernels", "torch"): "a reason"}) == []


def test_a_wrong_direction_without_a_cycle_is_found(package):
    (package / "core.py").write_text("def f():\n    import small.cli\n")
    (package / "cli.py").write_text("")
    graph = graph_of(package)
    assert cycle_in(graph) is None
    assert wrong_imports(graph, SMALL_ROOMS, {}) == ["small.core imports small.cli"]


def test_a_cycle_through_the_package_of_an_imported_module_is_found(package):
    (package / "torch" / "__init__.py").write_text("from small import cli\n")
    (package / "cli.py").write_text("import small.torch.loss\n")
    assert cycle_in(graph_of(package)) == ["small.cli", "small.torch", "small.cli"]


def test_a_cycle_through_a_name_put_together_is_found(package):
    (package / "kernels" / "__init__.py").write_text(
        "import importlib\nx = importlib.import_module(f'{__name__}.fast')\n"
    )
    (package / "kernels" / "options.py").write_text("from small import kernels\n")
    assert "small.kernels.options" in cycle_in(graph_of(package))
