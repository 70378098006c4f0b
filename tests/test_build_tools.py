"""How the build finds the CUDA compiler, and what it asks for where there is none."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def tool(monkeypatch):
    """Returns a function that imports a module of tools/ afresh."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def find_nvcc(tool, monkeypatch):
    """The module, on a machine that seems to have no toolkit and no compiler packages."""
    module = tool("find_nvcc")
    for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module, "DEFAULT_HOME", pathlib.Path("/nowhere"))
    monkeypatch.setattr(module.importlib.metadata, "version", versions({}))
    return module


def versions(known):
    def version(package):
        if package not in known:
            raise importlib.metadata.PackageNotFoundError(package)
        return known[package]

    return version


def make_toolkit(root, release="13.0", libraries="lib64"):
    """Lays out a toolkit whose nvcc is a script that answers as nvcc does; returns nvcc."""
    for file in ("include/cuda_runtime_api.h", f"{libraries}/libcudart_static.a"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    nvcc = root / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        f"""#!/bin/sh
if [ "$1" = --version ]; then
  echo "Cuda compilation tools, release {release}, V{release}.9"
else
  echo '#$ TOP={root}/bin/..' >&2
fi
"""
    )
    nvcc.chmod(0o755)
    return nvcc


def test_a_machine_without_any_compiler_is_told_where_was_looked(find_nvcc):
    with pytest.raises(find_nvcc.NoCompilerError) as error:
        find_nvcc.find()
    for place in ("$CUDACXX", "PATH", "$CUDA_HOME", "/nowhere/bin/nvcc", "nvidia-cuda-nvcc"):
        assert place in str(error.value)


def test_a_toolkit_is_described_wherever_its_libraries_lie(find_nvcc, tmp_path, monkeypatch):
    for libraries in ("lib64", "lib"):
        root = tmp_path / libraries
        monkeypatch.setenv("PATH", str(make_toolkit(root, libraries=libraries).parent))
        found = find_nvcc.find()
        assert (found.source, found.version) == ("system", "13.0.9")
        assert found.include == str(root / "include")
        assert found.cudart_static == str(root / libraries / "libcudart_static.a")


def test_cudacxx_comes_first_and_alone(find_nvcc, tmp_path, monkeypatch):
    on_path, named = make_toolkit(tmp_path / "a"), make_toolkit(tmp_path / "b")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setenv("CUDACXX", str(named))
    assert find_nvcc.find().nvcc == str(named)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "missing"))
    with pytest.raises(find_nvcc.NoCompilerError, match=r"\$CUDACXX: .*missing does not run"):
        find_nvcc.find("system")


def test_a_compiler_that_is_too_old_is_passed_over(find_nvcc, tmp_path, monkeypatch):
    old, new = make_toolkit(tmp_path / "old", "12.4"), make_toolkit(tmp_path / "new", "13.1")
    monkeypatch.setenv("PATH", str(old.parent))
    with pytest.raises(find_nvcc.NoCompilerError, match=r"is 12\.4\.9, older than 12\.8"):
        find_nvcc.find("system")
    monkeypatch.setenv("CUDA_HOME", str(new.parent.parent))
    assert find_nvcc.find("system").nvcc == str(new)


def test_a_toolkit_without_the_static_runtime_is_refused_by_name(find_nvcc, tmp_path, monkeypatch):
    nvcc = make_toolkit(tmp_path)
    (tmp_path / "lib64/libcudart_static.a").unlink()
    monkeypatch.setenv("PATH", str(nvcc.parent))
    with pytest.raises(find_nvcc.NoCompilerError, match=r"there is no libcudart_static\.a under"):
        find_nvcc.find("system")


def pypi_versions(find_nvcc, **changed):
    known = dict.fromkeys(find_nvcc.PYPI_PACKAGES, "13.0.88")
    return known | {f"nvidia-{name.replace('_', '-')}": value for name, value in changed.items()}


def test_the_packages_from_pypi_serve_where_the_machine_has_no_toolkit(
    find_nvcc, tmp_path, monkeypatch
):
    nvcc = make_toolkit(tmp_path / "nvidia/cu13", libraries="lib")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    # The version of cccl says nothing about the release of CUDA from 13.3 on.
    known = pypi_versions(find_nvcc, cuda_cccl="13.3.5.0.6")
    monkeypatch.setattr(find_nvcc.importlib.metadata, "version", versions(known))
    for source in ("auto", "pypi"):
        found = find_nvcc.find(source)
        assert (found.source, found.nvcc) == ("pypi", str(nvcc))
    with pytest.raises(find_nvcc.NoCompilerError):
        find_nvcc.find("system")


def test_packages_of_different_releases_are_refused(find_nvcc, monkeypatch):
    known = pypi_versions(find_nvcc, nvvm="13.5.37")
    monkeypatch.setattr(find_nvcc.importlib.metadata, "version", versions(known))
    with pytest.raises(find_nvcc.NoCompilerError, match=r"one CUDA release.*nvidia-nvvm 13\.5"):
        find_nvcc.find()


def test_a_missing_package_is_named(find_nvcc, monkeypatch):
    known = pypi_versions(find_nvcc)
    del known["nvidia-cuda-crt"]
    monkeypatch.setattr(find_nvcc.importlib.metadata, "version", versions(known))
    with pytest.raises(find_nvcc.NoCompilerError, match="nvidia-cuda-crt not installed"):
        find_nvcc.find("pypi")


@pytest.fixture
def backend(find_nvcc, tool, monkeypatch):
    """The build backend, on the same bare machine."""
    pytest.importorskip("scikit_build_core", reason="it is there where the extension was built")
    monkeypatch.delenv("SKBUILD_CMAKE_DEFINE", raising=False)
    return tool("build_backend")


def test_the_build_asks_for_the_compiler_where_the_machine_has_none(backend):
    for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        asked = [line for line in hook({}) if line.startswith("nvidia-")]
        assert [line.partition("==")[0] for line in asked] == [*backend.find_nvcc.PYPI_PACKAGES], (
            "every package that find_nvcc looks for, in its order"
        )
        releases = {line.partition("==")[2].partition(";")[0] for line in asked}
        assert len(releases) == 1, "pinned to one release"


def test_the_build_asks_for_no_compiler_where_the_machine_has_one(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(make_toolkit(tmp_path).parent))
    assert backend.compiler_requirements({}) == []
    assert backend.compiler_requirements({"cmake.define.B12X_CUDA": "pypi"}) != []


@pytest.mark.parametrize("choice", ["off", "OFF", "system"])
def test_the_build_asks_for_no_compiler_when_told_so(backend, choice, monkeypatch):
    assert backend.compiler_requirements({"cmake.define.B12X_CUDA": choice}) == []
    monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", f"X=1;B12X_CUDA={choice}")
    assert backend.compiler_requirements(None) == []


def test_an_unknown_source_of_the_compiler_is_refused(backend):
    with pytest.raises(ValueError, match="'conda'; it must be auto, system, pypi or off"):
        backend.compiler_requirements({"cmake.define.B12X_CUDA": "conda"})


@pytest.fixture
def make(tmp_path):
    """Returns a function that asks make what it would run, for a fresh clone."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")

    def dry_run(*arguments):
        command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", *arguments]
        # `make test` hands its own arguments down in these variables.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(
            command, cwd=TOOLS.parent, capture_output=True, text=True, env=environment
        )

    return dry_run


@pytest.mark.parametrize("target", ["build", "wheel"])
@pytest.mark.parametrize("choice", ["auto", "system", "pypi", "off"])
def test_make_hands_the_choice_of_compiler_to_pip_in_words_that_old_pips_know(make, target, choice):
    done = make(target, f"CUDA={choice}")
    assert done.returncode == 0, done.stderr
    assert f" --config-settings=cmake.define.B12X_CUDA={choice} " in done.stdout
    assert not re.search(r"-C ?cmake", done.stdout)


@pytest.mark.parametrize("choice", ["bogus", "", "off auto", "OFF"])
def test_make_refuses_another_word_for_the_compiler(make, choice):
    done = make("build", f"CUDA={choice}")
    assert done.returncode != 0
    assert f"CUDA is '{choice}'; it must be auto, system, pypi or off" in done.stderr
