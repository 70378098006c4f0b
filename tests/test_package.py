"""The package as one imports it."""

import subprocess
import sys

import pytest

import jax_b12x


def test_importing_the_package_imports_neither_jax_nor_the_extension():
    code = (
        "import sys, jax_b12x; assert jax_b12x.__version__;"
        "loaded = {'jax', 'numpy', 'jax_b12x.moe', 'jax_b12x._b12x'} & set(sys.modules);"
        "assert not loaded, loaded;"
        "assert jax_b12x.moe.plan and jax_b12x.quant;"
        "assert 'jax_b12x._b12x' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_others_are_refused():
    for name in jax_b12x.__all__:
        assert getattr(jax_b12x, name)
    assert dir(jax_b12x) == jax_b12x.__all__
    with pytest.raises(AttributeError, match="'jax_b12x' has no attribute 'mo'"):
        _ = jax_b12x.mo


def test_register_may_be_called_twice():
    jax_b12x.register()
    jax_b12x.register()
