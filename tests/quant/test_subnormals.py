"""Subnormal global scales, steps and inputs, pinned case by case.

XLA's CPU backend reads subnormal numbers as zero, and LLVM can turn comparisons of their bits into
float comparisons. Whether it does depends on the program around them, so each case runs op by op,
under ``jit`` with the global scale as a scalar, for each row, and as a constant.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quant_oracle as oracle
from test_formats import COLUMNS, check_nf3, draw_row, exactly

from jax_b12x.quant import mxfp4, mxfp8, nf3, nvfp4, softfloat

F32 = np.float32
SMALLEST, TINY = F32(2.0**-149), F32(2.0**-126)
NVFP4_ELEMENTS = np.concatenate([oracle.E2M1, -oracle.E2M1])  # of codes 0 to 15
NF3_ELEMENTS = np.tile(np.array(nf3.CODEBOOK, F32), 4)
FORMATS = [
    pytest.param(nvfp4, NVFP4_ELEMENTS, np.arange(16, dtype=np.uint8), id="nvfp4"),
    pytest.param(nf3, NF3_ELEMENTS, np.tile(np.arange(8, dtype=np.uint8), 4), id="nf3"),
]
# Global scales and block scales whose products, the steps, are subnormal or just above, and of
# which no element's product is rounded.
STEPS = [
    pytest.param(2.0**-127, (1, 2, 0.5, 4, 448, 1.75, 2.0**-6, 2.0**-9), id="subnormal-global"),
    pytest.param(2.0**-126, (1, 0.5, 0.125, 1.5, 448, 2.0**-9, 2, 8), id="subnormal-products"),
    pytest.param(2.0**-120, (2.0**-9, 2.0**-8, 3 * 2.0**-9, 1, 2.0**-7, 7, 448, 1), id="normal"),
    pytest.param(2.0**-145, (1, 2, 3.5, 448, 32, 240, 13, 1), id="smallest-steps"),
]


def row(values):
    """Values of the formats' blocks, with zeros up to the one shape that these tests compile."""
    values = np.asarray(values, F32).reshape(-1)
    return np.pad(values, (0, COLUMNS - len(values)))


def scalar(module, x, g):
    return module.quantize(x, g)  # quantize is jitted itself


def per_row(module, x, g):
    q = module.quantize(np.stack([x, x]), np.array([1, g], F32))
    return jax.tree.map(lambda a: a[1], q)


def constant(module, x, g):
    return with_constant(module, g)(x)


@functools.cache
def with_constant(module, g):
    return jax.jit(lambda x: module.quantize(x, g))


def op_by_op(module, x, g):
    with jax.disable_jit():
        return module.quantize(x, g)


PROGRAMS = [scalar, per_row, constant, op_by_op]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("g", "scales"), STEPS)
@pytest.mark.parametrize(("module", "elements", "codes"), FORMATS)
def test_elements_times_a_subnormal_step_are_found_again(
    module, elements, codes, g, scales, program
):
    scales = np.array(scales, F32)
    x = elements * (scales[:, None].astype(np.float64) * g)
    q = program(module, row(x), F32(g))
    exactly(q.scale[: len(scales)], scales.astype(ml_dtypes.float8_e4m3fn))
    exactly(module.unpack(q.data)[: x.size], np.tile(codes, len(scales)))


# A row of 16 blocks of every magnitude, which one version of XLA quantized wrongly.
@pytest.mark.parametrize("program", [scalar, per_row, op_by_op])
@pytest.mark.parametrize("g", [1e-38, 1e-42, SMALLEST, TINY, np.nextafter(TINY, F32(0))], ids=str)
def test_rows_of_every_magnitude_meet_a_subnormal_global_scale(g, program):
    x, g = draw_row(1, 0.0), F32(g)
    codes, scale = oracle.nvfp4(x, g)
    q = program(nvfp4, x, g)
    exactly(q.scale, scale)
    exactly(nvfp4.unpack(q.data), codes)
    check_nf3(x, g, program(nf3, x, g))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("module", "elements", "codes"), FORMATS)
def test_subnormal_inputs_under_a_normal_global_scale(module, elements, codes, program):
    del codes
    # By the block: what just rounds to the smallest scale or not, and far smaller numbers.
    largest = np.array([2.0**-127, 2.0**-128, 2.0**-136, 2.0**-149, 0], np.float64)
    elements = elements / np.abs(elements).max()
    x = row(elements * largest[:, None])
    for g in (F32(2.0**-120), F32(1)):
        q = program(module, x, g)
        if module is nvfp4:
            codes, scale = oracle.nvfp4(x, g)
            exactly(q.scale, scale)
            exactly(nvfp4.unpack(q.data), codes)
        else:
            check_nf3(x, g, q)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("module", "zero"), [(nvfp4, 0), (nf3, nf3.ZERO)], ids=["nvfp4", "nf3"])
def test_nan_and_infinity_beside_a_subnormal_global_scale(module, zero, program):
    x = np.full((3, module.BLOCK), 448 * SMALLEST, F32)
    x[0, 3], x[1, 5] = np.nan, np.inf
    q = program(module, row(x), SMALLEST)
    codes = np.asarray(module.unpack(q.data)).reshape(-1, module.BLOCK)[:3]
    # In fp32, (448 * 2**-149 / 6) / 2**-149 is 75, whose nearest scale is 72; 448 / 72 saturates.
    scale = {nvfp4: 72, nf3: 448}[module]
    np.testing.assert_array_equal(np.asarray(q.scale).astype(F32)[:3], [np.nan, 448, scale])
    assert (codes[0] == zero).all()
    # 1, the ratio of the others to the saturated step, has code 2 in E2M1 and 7 in the codebook.
    np.testing.assert_array_equal(codes[1], np.where(np.isinf(x[1]), 7, {nvfp4: 2, nf3: 7}[module]))
    assert (codes[2] == 7).all()


@pytest.mark.parametrize("mode", [True, False], ids=["op-by-op", "jit"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("module", "elements"), [(mxfp4, oracle.E2M1), (mxfp8, oracle.E4M3)], ids=["mxfp4", "mxfp8"]
)
def test_mx_formats_keep_subnormal_numbers(module, elements, dtype, mode):
    # With the smallest scale, 2**-127, whose code is 0, every element is held exactly.
    elements = np.concatenate([elements, -elements]).astype(F32)
    x = (np.resize(elements, COLUMNS) * 2.0**-127).astype(F32)
    assert ((x != 0) & (np.abs(x) < TINY)).any()
    x = x.astype(dtype)
    q = oracle.run(mode, module.quantize, jnp.asarray(x))
    exactly(np.asarray(q.scale).view(np.uint8), np.zeros(len(x) // 32, np.uint8))
    y = oracle.run(mode, lambda q: module.dequantize(q, dtype), q)
    assert y.dtype == dtype
    exactly(np.asarray(y), np.asarray(x))


@pytest.mark.parametrize("mode", [True, False], ids=["op-by-op", "jit"])
@pytest.mark.parametrize(("module", "elements", "codes"), FORMATS)
def test_dequantizing_takes_subnormal_scales_and_products_for_zero(module, elements, codes, mode):
    del codes
    scales = np.array([1, 0.5, 2.0**-9, 2], F32)
    x = row(elements * scales[:, None].astype(np.float64) * 2.0**-126)
    expected = np.where(np.abs(x) < TINY, 0, x)
    assert (expected != 0).any()
    assert (expected != x).any()
    q = module.quantize(x, TINY)
    np.testing.assert_array_equal(oracle.run(mode, module.dequantize, q), expected)
    q = module.quantize(x / 2, TINY / 2)
    assert not np.asarray(oracle.run(mode, module.dequantize, q)).any()


NUMBERS = np.array(
    [0, -0.0, SMALLEST, -SMALLEST, 1e-40, 1e-38, np.nextafter(TINY, F32(0)), TINY, 1, 448, np.inf],
    F32,
)


def positive_or_zero(x):
    """Chooses floats by their bits: the program in which LLVM took ``> 0`` for a float's."""
    bits = softfloat.to_bits(x)
    return jnp.where((bits < np.uint32(0x7F800000)) & (bits > 0), x, F32(0))


@pytest.mark.parametrize("shape", ["vector", "scalars"])
def test_zero_is_told_from_subnormal_numbers_in_any_program(shape):
    test = jax.jit(lambda x: softfloat.is_zero(positive_or_zero(x)))
    actual = test(NUMBERS) if shape == "vector" else [bool(test(x)) for x in NUMBERS]
    np.testing.assert_array_equal(actual, (NUMBERS <= 0) | np.isinf(NUMBERS))
    positive = jax.jit(lambda x: softfloat.is_positive_and_finite(softfloat.to_bits(x)))
    actual = positive(NUMBERS) if shape == "vector" else [bool(positive(x)) for x in NUMBERS]
    np.testing.assert_array_equal(actual, (NUMBERS > 0) & np.isfinite(NUMBERS))


@pytest.mark.parametrize("operation", ["divide", "multiply_short"])
def test_softfloat_sees_subnormal_operands_in_any_program(operation):
    function = getattr(softfloat, operation)
    ieee = np.divide if operation == "divide" else np.multiply
    right = jax.jit(lambda x, y: function(x, positive_or_zero(y)))
    left = jax.jit(lambda x, y: function(positive_or_zero(x), y))
    x = np.array([448, 2.0**-9, np.inf, 0], F32)
    with np.errstate(all="ignore"):
        for y in NUMBERS:
            chosen = y if np.isfinite(y) and y > 0 else F32(0)
            exactly_but_nan(right(x, y), ieee(x, chosen))
            if operation == "divide":
                exactly_but_nan(left(y, x), ieee(chosen, x))


def exactly_but_nan(actual, expected):
    actual = np.asarray(actual)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    exactly(actual[~np.isnan(expected)], expected[~np.isnan(expected)])
