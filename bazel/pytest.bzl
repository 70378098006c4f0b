"""A py_test that runs one file of tests with pytest."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, src, deps, data):
    """Runs the tests in `src`.

    Args:
      name: the target's name.
      src: the file of tests.
      deps: Python libraries.
      data: what the tests read, and the modules beside them that they import.
    """
    py_test(
        name = name,
        srcs = ["//bazel:pytest_main.py", src],
        args = [src],
        data = data,
        # No __init__.py where the source tree has none: pytest would take folders for packages.
        legacy_create_init = 0,
        main = "//bazel:pytest_main.py",
        python_version = "PY3",
        timeout = "long",
        deps = deps,
    )
