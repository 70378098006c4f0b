import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quant_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_b12x.quant import QuantizedTensor, e2m1, mxfp4, mxfp8, nf3, nvfp4

FORMATS = {"nvfp4": nvfp4, "mxfp4": mxfp4, "mxfp8": mxfp8, "nf3": nf3}
MODES = [pytest.param(lambda f: f, id="eager"), pytest.param(jax.jit, id="jit")]
COLUMNS = 512  # one shape for the property tests, so that each traces once
SHAPE = (3, 5, 256)  # and one for the others

specials = st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-38, 3e38, 6.0, 448.0])
seeds = st.integers(0, 2**32 - 1)
BAD_SCALES = (0.0, -0.0, -1.0, np.inf, -np.inf, np.nan)
# Now and then op by op, which is slow, and always under jit.
modes_of_jit = st.integers(0, 9).map(lambda n: (False, True) if n == 9 else (False,))
global_scales = st.sampled_from(
    [1.0, 0.37, 1 / 2688, 2.0**-20, 1e-30, 1e-38, 1e-42, 1e-45, 1e30, 3e38, *BAD_SCALES]
).map(np.float32)


def draw_row(seed, value):
    """A row whose blocks have magnitudes of every kind; one block holds the special value."""
    rng = np.random.default_rng(seed)
    x = oracle.awkward_floats(rng, COLUMNS)
    near = (
        rng.standard_normal(COLUMNS)
        * np.ldexp(1.0, rng.integers(-149, 120, COLUMNS // 16))[np.arange(COLUMNS) // 16]
    )
    x = np.where(np.arange(COLUMNS) % 128 < 96, near, x).astype(np.float32)
    x[rng.integers(COLUMNS)] = value
    return x


def exactly(actual, expected):
    actual, expected = np.atleast_1d(actual), np.atleast_1d(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@settings(max_examples=200, deadline=None)
@given(seed=seeds, value=specials, g=global_scales, modes=modes_of_jit)
def test_nvfp4_quantizes_bit_for_bit_as_the_contract_is_written(seed, value, g, modes):
    x = draw_row(seed, value)
    codes, scale = oracle.nvfp4(x, g)
    for op_by_op in modes:
        q = oracle.run(op_by_op, nvfp4.quantize, x, g)
        exactly(q.scale, scale)
        exactly(nvfp4.unpack(q.data), codes)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, value=specials, g=global_scales, modes=modes_of_jit)
def test_nvfp4_dequantizes_to_the_product_with_subnormals_as_zero(seed, value, g, modes):
    q = nvfp4.quantize(draw_row(seed, value), g)
    elements = np.asarray(e2m1.decode(nvfp4.unpack(q.data)))
    scale = np.asarray(q.scale).astype(np.float32).repeat(16)
    tiny = np.float32(2.0**-126)
    usable = g if np.isfinite(g) and g >= tiny else np.float32(0)
    with np.errstate(all="ignore"):
        expected = elements * scale * usable
    expected = np.where(np.abs(expected) < tiny, 0, expected)
    for op_by_op in modes:
        np.testing.assert_array_equal(oracle.run(op_by_op, nvfp4.dequantize, q), expected)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, value=specials, modes=modes_of_jit)
def test_mx_formats_quantize_as_the_specification_says(seed, value, modes):
    x = draw_row(seed, value)
    for module, emax, encode in ((mxfp4, 2, oracle.e2m1), (mxfp8, 8, oracle.e4m3)):
        exponent, scaled = oracle.mx(x, emax)
        # `scaled` is exact in fp64; fp32 can hold it but for values far below the smallest element.
        with np.errstate(all="ignore"):
            elements = encode(scaled.astype(np.float32)).reshape(-1)
        for op_by_op in modes:
            q = oracle.run(op_by_op, module.quantize, x)
            exactly(q.scale, (exponent + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu))
            exactly(module.unpack(q.data), elements)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, value=specials, modes=modes_of_jit)
def test_mx_formats_dequantize_exactly(seed, value, modes):
    x = draw_row(seed, value)
    for module, decode in ((mxfp4, e2m1.decode), (mxfp8, lambda v: v)):
        q = module.quantize(x)
        elements = np.asarray(decode(module.unpack(q.data))).astype(np.float64)
        expected = elements * np.asarray(q.scale).astype(np.float64).repeat(32)
        for op_by_op in modes:
            exact = expected.astype(np.float32)
            actual = np.asarray(oracle.run(op_by_op, module.dequantize, q))
            np.testing.assert_array_equal(actual, exact)
            number = ~np.isnan(exact)
            np.testing.assert_array_equal(np.signbit(actual[number]), np.signbit(exact[number]))


@settings(max_examples=100, deadline=None)
@given(seed=seeds, value=specials, g=global_scales, modes=modes_of_jit)
def test_nf3_quantizes_to_the_nearest_codebook_value(seed, value, g, modes):
    x = draw_row(seed, value)
    for op_by_op in modes:
        q = oracle.run(op_by_op, nf3.quantize, x, g)
        check_nf3(x, g, q)


def test_nf3_does_not_flush_a_subnormal_global_scale():
    # Seed 1 draws a block of subnormal numbers, whose scale is far from saturating.
    x, g = draw_row(1, 0.0), np.float32(1e-38)
    check_nf3(x, g, nf3.quantize(x, g))


def check_nf3(x, g, q):
    scale = np.asarray(q.scale).astype(np.float32)
    codes = np.asarray(nf3.unpack(q.data)).reshape(-1, 32)
    usable = bool(np.isfinite(g) and g > 0)
    for block, s, code in zip(x.reshape(-1, 32), scale, codes, strict=True):
        amax = np.abs(block).max()
        assert np.isnan(s) == np.isnan(amax)
        with np.errstate(all="ignore"):
            wanted = oracle.e4m3(np.array(amax / g if usable else 0, np.float32))
            assert np.isnan(amax) or s == wanted.astype(np.float32)
            if np.isnan(amax) or s == 0:
                assert (code == nf3.ZERO).all()
                continue
            ratio = np.where(np.isinf(block), block, block / np.float32(s * g)).clip(-2, 2)
        distance = np.abs(ratio[:, None].astype(np.float64) - np.array(nf3.CODEBOOK))
        chosen = np.take_along_axis(distance, code[:, None].astype(int), axis=1)[:, 0]
        np.testing.assert_array_equal(chosen, distance.min(axis=1))


# Every e2m1 * e4m3 (or codebook * e4m3) product, against fp64.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["nvfp4", "nf3"])
def test_unscaled_values_are_exact_in_bf16(name, dtype):
    module = FORMATS[name]
    codes = np.tile(
        np.arange(16 if name == "nvfp4" else 8, dtype=np.uint8), 1 if name == "nvfp4" else 4
    )
    scale = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None]
    data = module.pack(jnp.asarray(np.tile(codes, (127, 1))))
    q = QuantizedTensor(data, jnp.asarray(scale), jnp.float32(0.1), name)
    book = e2m1.decode(codes) if name == "nvfp4" else nf3.decode(codes)
    expected = np.asarray(book, np.float64) * scale.astype(np.float64)
    values = module.dequantize(q, dtype, apply_global_scale=False)
    assert values.dtype == dtype
    np.testing.assert_array_equal(np.asarray(values, np.float64), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_error_is_within_half_a_step_of_the_block(name, dtype):
    module = FORMATS[name]
    x = jnp.asarray(np.random.default_rng(21).standard_normal(SHAPE), dtype)
    q = module.quantize(x)
    assert q.shape == x.shape
    x = np.asarray(x, np.float32).reshape(3, 5, -1, module.BLOCK)
    y = np.asarray(module.dequantize(q)).reshape(x.shape)
    # Half the widest gap between neighbours as a share of the largest value, and how far the scale
    # can be off: an E4M3 scale by 1/16; with an MX scale, what is beyond the largest element (6 of
    # 8, 448 of 512) is cut off.
    worst = {"nvfp4": 1 / 6 + 1 / 16, "mxfp4": 1 / 4, "mxfp8": 1 / 8, "nf3": 0.4375 / 2 + 1 / 16}[
        name
    ]
    error = np.abs(x - y).max(axis=-1)
    assert (error <= worst * np.abs(x).max(axis=-1) * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_makes_its_own_block_nan_and_no_other(name):
    module = FORMATS[name]
    x = np.ones(SHAPE, np.float32)
    x[1, 2, module.BLOCK + 3] = np.nan
    y = np.asarray(module.dequantize(module.quantize(x)))
    expected = np.zeros(x.shape, bool)
    expected[1, 2, module.BLOCK : 2 * module.BLOCK] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_an_infinity_saturates(name):
    module = FORMATS[name]
    x = np.zeros(SHAPE, np.float32)
    x[0, 0, [0, 5]] = np.inf, -np.inf
    y = np.asarray(module.dequantize(module.quantize(x))).reshape(-1)
    largest = {"nvfp4": 6 * 448, "mxfp4": 6 * 2.0**125, "mxfp8": 448 * 2.0**119, "nf3": 448}[name]
    assert (y[0], y[5]) == (largest, -largest)
    assert not np.delete(y, [0, 5]).any()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name):
    module = FORMATS[name]
    q = module.quantize(jnp.zeros(SHAPE))
    assert not np.asarray(module.dequantize(q)).any()
    assert not np.isnan(np.asarray(q.scale).astype(np.float32)).any()


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_array_is_quantized_to_an_empty_one(name):
    module = FORMATS[name]
    for shape in ((0, 64), (2, 0)):
        q = module.quantize(jnp.zeros(shape))
        assert module.dequantize(q).shape == q.shape == shape


@pytest.mark.parametrize("name", ["nvfp4", "nf3"])
def test_a_global_scale_for_each_expert_is_that_of_each_expert_alone(name):
    module = FORMATS[name]
    x = np.random.default_rng(22).standard_normal(SHAPE).astype(np.float32)
    g = np.array([1e-3, 0.5, 7.0], np.float32)
    y = module.dequantize(module.quantize(x, g[:, None]))
    for i in range(3):
        alone = module.dequantize(module.quantize(x, float(g[i])))
        np.testing.assert_array_equal(y[i], alone[i])


def test_nvfp4_global_scale_lets_the_largest_value_survive():
    x = np.random.default_rng(23).standard_normal(SHAPE).astype(np.float32) * np.float32(1e-4)
    amax = np.abs(x).max()
    y = np.asarray(nvfp4.dequantize(nvfp4.quantize(x, float(nvfp4.global_scale(amax)))))
    np.testing.assert_allclose(np.abs(y).max(), amax, rtol=1e-6)
    unusable = nvfp4.global_scale(np.array([0, -1, np.inf, np.nan, 1e-40], np.float32))
    np.testing.assert_array_equal(unusable, np.ones(5, np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_bad_inputs_are_refused_by_name(name):
    module = FORMATS[name]
    with pytest.raises(ValueError, match=rf"x has shape \(2, 33\).*multiple of {module.BLOCK}"):
        module.quantize(jnp.zeros((2, 33)))
    with pytest.raises(TypeError, match="x has dtype int32"):
        module.quantize(jnp.zeros((2, 32), jnp.int32))
    with pytest.raises(ValueError, match="x is a scalar"):
        module.quantize(jnp.float32(1))
    q = module.quantize(jnp.zeros(SHAPE))
    other = "mxfp4" if name != "mxfp4" else "nvfp4"
    with pytest.raises(ValueError, match=rf"q is a {name} tensor"):
        FORMATS[other].dequantize(q)
    with pytest.raises(ValueError, match=r"q\.scale has shape \(3, 5, 1\)"):
        module.dequantize(QuantizedTensor(q.data, q.scale[..., :1], q.global_scale, name))
    if name in ("nvfp4", "nf3"):
        with pytest.raises(ValueError, match=r"global_scale has shape \(3,\)"):
            module.quantize(jnp.zeros((2, 64)), jnp.ones(3))


@pytest.mark.parametrize("mode", MODES)
def test_a_quantized_tensor_passes_through_transformations(mode):
    x = np.random.default_rng(24).standard_normal(SHAPE[1:]).astype(np.float32)
    y = mode(jax.vmap(lambda row: nvfp4.dequantize(nvfp4.quantize(row, 0.1))))(x)
    np.testing.assert_array_equal(y, nvfp4.dequantize(nvfp4.quantize(x, 0.1)))


def test_wide_types_change_nothing():
    x = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    for module in FORMATS.values():
        q = module.quantize(x)
        with jax.enable_x64(True):
            wide = module.quantize(x)
            jax.tree.map(exactly, wide, q)
            exactly(module.dequantize(wide), module.dequantize(q))
