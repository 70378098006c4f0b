"""The extension: how it is loaded and registered."""

import jax
import jaxlib

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
