"""What the package imports is what it declares, and no more."""

import ast
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The module where it is not named as the distribution is.
MODULES = {"cuda-bindings": "cuda"}


def modules(requirements):
    """Returns the top-level modules of requirement lines, in this package's extras as well."""
    names = [re.match(r"[\w-]+", line)[0] for line in requirements]
    return {MODULES.get(name, name) for name in names}


def imported():
    """Returns the top-level third-party modules that the package imports, here or there."""
    found = set()
    for path in (ROOT / "jax_b12x").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module)
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                argument = node.args[0]
                if isinstance(argument, ast.Constant):
                    found.add(argument.value)
    tops = {name.split(".")[0] for name in found}
    return tops - set(sys.stdlib_module_names) - {"jax_b12x", "__future__"}


def test_every_import_is_declared():
    extras = PROJECT["optional-dependencies"]
    declared = modules(PROJECT["dependencies"])
    for extra in ("cuda13", "flax", "plot"):
        declared |= modules(extras[extra])
    # Benchmarks compare with it where somebody has installed it; nothing else needs it.
    optional = {"tokamax"}
    assert imported() - declared - optional == set()


def test_every_runtime_dependency_is_imported():
    # jaxlib is what jax runs on; naming it bounds its version, which the extension depends on.
    assert modules(PROJECT["dependencies"]) - imported() <= {"jaxlib"}


def test_the_version_is_said_once_for_python_and_once_for_the_package():
    import jax_b12x

    assert jax_b12x.__version__ == PROJECT["version"]
