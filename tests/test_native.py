"""The extension: how it is loaded and registered."""

import ast
import pathlib
from types import SimpleNamespace

import jax
import jaxlib
import pytest

import jax_b12x
from jax_b12x import _native


def test_host_extension_lists_the_moe_target():
    targets, _ = _native.host().ffi_registry()
    assert "execute" in targets["b12x_moe"]


def test_host_extension_was_built_against_the_ffi_of_a_supported_jaxlib():
    assert _native.host().XLA_FFI_API_VERSION >= (0, 3), jaxlib.__version__


def test_baseline_kernels_are_always_usable():
    assert _native.host().host_isas()[0] == "baseline"


def test_registration_may_be_asked_for_again():
    _native.ensure_registered()
    _native.ensure_registered()
    assert jax.devices()


def test_the_stub_names_what_is_in_the_extension_and_nothing_else():
    stub = ast.parse((pathlib.Path(jax_b12x.__file__).parent / "_b12x.pyi").read_text())
    extension = _native.host()
    assert names_in(stub.body) == public(extension)
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and not node.bases:
            assert names_in(node.body) == public(getattr(extension, node.name)), node.name


def names_in(body):
    definitions = ast.FunctionDef | ast.ClassDef
    functions = {node.name for node in body if isinstance(node, definitions)}
    return functions | {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


def public(owner):
    return {name for name in dir(owner) if not name.startswith("_")}


def test_an_extension_that_is_newer_than_jaxlib_says_how_to_mend_it(monkeypatch):
    # The words are those of jaxlib 0.10.2 about an extension that was built for jaxlib 0.11.2.
    def refuse(name, stages, platform):
        raise jax.errors.JaxRuntimeError(
            f"INVALID_ARGUMENT: XLA FFI handler registration for {name} failed because the "
            "handler's API version (0.4) is incompatible with the framework's API version (0.3)."
        )

    newer = SimpleNamespace(
        __name__="jax_b12x._b12x",
        XLA_FFI_API_VERSION=(0, 4),
        ffi_registry=lambda: ({"b12x_moe": {}}, {}),
    )
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    with pytest.raises(_native.NativeError, match=r"FFI API 0\.4, which is newer.*build it again"):
        _native._register(newer, "cpu")
