"""What the build takes from this machine: Python and its packages, nvcc, and CMake's source list.

Two variables say what it is, given as `--repo_env=NAME=VALUE`:

- `B12X_PYTHON`: the interpreter whose environment holds jaxlib (for its XLA FFI headers), nanobind
  and, to test, what the tests import; `python3` if unset.
- `B12X_CUDA`: `auto`, `system`, `pypi` or `off`, as for CMake.
"""

_WATCHED = [
    "//:cmake/sources.cmake",
    "//:tools/find_nvcc.py",
    "//:bazel/environment.py",
]

def _environment_repository_impl(rctx):
    sources, find_nvcc, script = [rctx.path(Label(label)) for label in _WATCHED]
    python = rctx.os.environ.get("B12X_PYTHON") or "python3"
    asked = rctx.execute([
        python,
        script,
        rctx.path("."),
        sources,
        find_nvcc.dirname,
        rctx.os.environ.get("B12X_CUDA", "auto"),
    ], timeout = 300)
    if asked.return_code != 0:
        fail("%s cannot serve the build: %s" % (python, asked.stderr))
    for name, target in json.decode(asked.stdout).items():
        rctx.symlink(target, name)

environment_repository = repository_rule(
    implementation = _environment_repository_impl,
    doc = "Makes a repository of symbolic links into the local environment.",
    environ = ["B12X_CUDA", "B12X_PYTHON", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "PATH"],
    local = True,
)
