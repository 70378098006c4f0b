import numpy as np
import pytest
from quant_oracle import E4M3, awkward_floats, run

from jax_b12x.quant import softfloat

MODES = [pytest.param(True, id="op-by-op"), pytest.param(False, id="jit")]
FINITE = (0.0, -0.0, 1.0, -1.5, 6.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38)
SPECIAL = np.array([*FINITE, np.inf, -np.inf, np.nan], np.float32)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    nan = np.isnan(b)
    np.testing.assert_array_equal(np.isnan(a), nan)
    np.testing.assert_array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan])


@pytest.mark.parametrize("mode", MODES)
def test_divide_gives_the_bits_of_ieee_division(mode):
    rng = np.random.default_rng(11)
    x, y = np.repeat(SPECIAL, len(SPECIAL)), np.tile(SPECIAL, len(SPECIAL))
    for exponents in ((-150, 128), (-2, 2), (-150, -120)):
        x = np.concatenate([x, awkward_floats(rng, 20_000, exponents)])
        y = np.concatenate([y, awkward_floats(rng, 20_000, exponents)])
    with np.errstate(all="ignore"):  # one shape, compiled once
        for divisor in (y, np.full(y.shape, 6, np.float32)):
            same_bits(run(mode, softfloat.divide, x, divisor), x / divisor)


@pytest.mark.parametrize("mode", MODES)
def test_multiply_short_gives_the_bits_of_ieee_multiplication(mode):
    rng = np.random.default_rng(12)
    y = np.concatenate([SPECIAL, awkward_floats(rng, 2_000)])
    x = np.concatenate([E4M3, -E4M3, np.array([np.nan, np.inf], np.float32)])[:, None]
    with np.errstate(all="ignore"):
        same_bits(run(mode, softfloat.multiply_short, x, y), x * y)


@pytest.mark.parametrize("mode", MODES)
def test_scaling_by_a_power_of_two_rounds_once(mode):
    rng = np.random.default_rng(13)
    x = np.concatenate([SPECIAL, awkward_floats(rng, 2_000)])
    e = np.arange(-300, 301, 7, dtype=np.int32)[:, None]
    with np.errstate(all="ignore"):
        expected = np.ldexp(x.astype(np.float64), e).astype(np.float32)
    same_bits(run(mode, softfloat.scale_by_power_of_two, x, e), expected)
