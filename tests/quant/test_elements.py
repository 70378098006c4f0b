import ml_dtypes
import numpy as np
import pytest
import quant_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_b12x.quant import e2m1, e4m3, e8m0, nf3

MODES = [pytest.param(True, id="op-by-op"), pytest.param(False, id="jit")]
ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def around_midpoints(values):
    """Every value, every midpoint of neighbours, and the floats next to those, both signs."""
    values = np.unique(np.abs(np.asarray(values, np.float64)))
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    points = np.concatenate([points, up, down])
    return np.concatenate([points, -points])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("x", [ALL_BF16, around_midpoints(oracle.E2M1)], ids=["bf16", "midpoints"])
def test_e2m1_encodes_to_the_nearest_value(mode, x):
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(oracle.run(mode, e2m1.encode, x), oracle.e2m1(x))


def test_e2m1_encodes_nan_to_the_largest_value():
    np.testing.assert_array_equal(e2m1.encode(np.array([np.nan, -np.nan], np.float32)), [7, 7])


@pytest.mark.parametrize("mode", MODES)
def test_e2m1_decodes_every_code(mode):
    codes = np.arange(16, dtype=np.uint8)
    values = np.asarray(oracle.run(mode, e2m1.decode, codes))
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(e2m1.encode(values), codes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("x", [ALL_BF16, around_midpoints(oracle.E4M3)], ids=["bf16", "midpoints"])
def test_e4m3_encodes_to_the_nearest_value_and_saturates(mode, x):
    codes = np.asarray(oracle.run(mode, e4m3.encode, x))
    np.testing.assert_array_equal(codes.view(np.uint8), oracle.e4m3(x).view(np.uint8))


def test_e4m3_encodes_as_ml_dtypes_does_where_that_does_not_overflow():
    x = np.random.default_rng(14).standard_normal(100_000).astype(np.float32) * 100
    x = x[np.abs(x) <= e4m3.MAX]
    expected = x.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(e4m3.encode(x).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("mode", MODES)
def test_e4m3_decodes_every_code(mode):
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    values = np.asarray(oracle.run(mode, e4m3.decode, codes))
    np.testing.assert_array_equal(values, codes.astype(np.float32))
    number = ~np.isnan(values)
    assert number.sum() == 254
    encoded = np.asarray(e4m3.encode(values)).view(np.uint8)
    np.testing.assert_array_equal(encoded[number], codes.view(np.uint8)[number])


def test_e8m0_clamps_and_keeps_nan():
    exponent = np.array([-1000, -128, -127, 0, 127, 128, 1000, 5], np.int32)
    nan = np.array([False] * 7 + [True])
    scale = e8m0.encode(exponent, nan)
    np.testing.assert_array_equal(scale.view(np.uint8), [0, 0, 0, 127, 254, 254, 254, 255])
    decoded, is_nan = e8m0.decode(scale)
    np.testing.assert_array_equal(decoded[:-1], [-127, -127, -127, 0, 127, 127, 127])
    np.testing.assert_array_equal(is_nan, nan)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("x", [ALL_BF16, around_midpoints(nf3.CODEBOOK)], ids=["bf16", "midpoints"])
def test_nf3_encodes_to_the_nearest_value_with_ties_to_even(mode, x):
    x = x[~np.isnan(x)]
    distance = np.abs(np.clip(x, -2, 2).astype(np.float64)[:, None] - np.array(nf3.CODEBOOK))
    tied = distance == distance.min(axis=1, keepdims=True)
    # Of the one or two codes at the smallest distance, the even one where there are two.
    first, last = tied.argmax(axis=1), 7 - tied[:, ::-1].argmax(axis=1)
    expected = np.where(first % 2 == 0, first, last)
    np.testing.assert_array_equal(oracle.run(mode, nf3.encode, x), expected)


def test_nf3_codebook_is_the_normal_float_construction_rounded_to_e4m3():
    def quantile(p):  # of N(0, 1), by bisection of its distribution function
        from math import erf, sqrt

        low, high = -10.0, 10.0
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if (1 + erf(middle / sqrt(2))) / 2 < p else (low, middle)
        return low

    offset = 1 - (1 / 16 + 1 / 14) / 2
    negative = [quantile(p) for p in np.linspace(1 - offset, 0.5, 4)[:-1]]
    positive = [quantile(p) for p in np.linspace(0.5, offset, 5)[1:]]
    book = np.array([*negative, 0.0, *positive]) / -negative[0]
    rounded = oracle.e4m3(book).astype(np.float32)
    np.testing.assert_array_equal(rounded, np.array(nf3.CODEBOOK, np.float32))
    np.testing.assert_array_equal(nf3.decode(np.arange(8, dtype=np.uint8)), rounded)


shapes = st.tuples(st.integers(0, 3), st.integers(0, 5))


@settings(max_examples=25, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_packing_is_lossless_and_ordered(shape, seed):
    rng = np.random.default_rng(seed)
    rows, n = shape
    codes = rng.integers(0, 16, (rows, 2 * n), dtype=np.uint8)
    packed = np.asarray(e2m1.pack(codes))
    np.testing.assert_array_equal(packed, codes[:, 0::2] + 16 * codes[:, 1::2])
    np.testing.assert_array_equal(e2m1.unpack(packed), codes)

    codes = rng.integers(0, 8, (rows, 8 * n), dtype=np.uint8)
    packed = np.asarray(nf3.pack(codes))
    assert packed.shape == (rows, 3 * n)
    np.testing.assert_array_equal(nf3.unpack(packed), codes)
    for row in range(rows):
        for group in range(n):
            word = int.from_bytes(packed[row, 3 * group : 3 * group + 3].tobytes(), "little")
            assert [word >> 3 * i & 7 for i in range(8)] == list(codes[row, 8 * group :][:8])


def test_packing_refuses_a_part_of_a_group():
    with pytest.raises(ValueError, match="codes have 3 columns"):
        e2m1.pack(np.zeros((2, 3), np.uint8))
    with pytest.raises(ValueError, match="codes have 12 columns"):
        nf3.pack(np.zeros((2, 12), np.uint8))
