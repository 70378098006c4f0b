"""The formats again, in NumPy: nearest values by search, fp32 arithmetic by NumPy (IEEE)."""

import jax
import ml_dtypes
import numpy as np

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)


def run(op_by_op, function, *args):
    """Calls a function of the package with its operations compiled one by one, or all together."""
    with jax.disable_jit(op_by_op):
        return function(*args)


def nearest(x, table):
    """Index of the entry of an ascending ``table`` nearest to each |x|; ties take the even."""
    a = np.abs(np.asarray(x, np.float64)).clip(max=1e30)
    upper = np.searchsorted(table, a).clip(1, len(table) - 1)
    below = a - table[upper - 1].astype(np.float64)
    above = table[upper].astype(np.float64) - a
    go_up = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(go_up, upper, upper - 1)


def e2m1(x):
    x = np.asarray(x, F32)
    return (nearest(x, E2M1) | np.where(np.signbit(x), 8, 0)).astype(np.uint8)


def e4m3(x):
    x = np.asarray(x, F32)
    code = nearest(np.nan_to_num(x, nan=0.0, posinf=1e30, neginf=1e30), E4M3)
    code = code | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


def nvfp4(x, g):
    """Codes and scales of one row ``x: f32[columns]``, block by block, as the contract reads."""
    codes, scales = [], []
    with np.errstate(all="ignore"):
        for block in np.asarray(x, F32).reshape(-1, 16):
            amax = np.abs(block).max()
            bad = not (np.isfinite(g) and g > 0)
            if np.isnan(amax):
                s = e4m3(np.array(np.nan))
            elif bad:
                s = e4m3(np.array(0.0))
            else:
                s = e4m3(np.array(F32(F32(amax / F32(6)) / F32(g))))
            scales.append(s)
            step = F32(s.astype(F32) * F32(g))
            if np.isnan(amax) or bad or s.astype(F32) == 0:
                codes.append(np.zeros(16, np.uint8))
                continue
            codes.append(e2m1(np.where(np.isinf(block), block, block / step)))
    return np.concatenate(codes), np.array(scales, ml_dtypes.float8_e4m3fn)


def mx(x, emax):
    """Exponents of the block scales (128 for NaN) and the scaled blocks, in fp64, of one row."""
    exponents, scaled = [], []
    for block in np.asarray(x, F32).reshape(-1, 32):
        amax = np.abs(block).max()
        if np.isnan(amax):
            exponents.append(128)
            scaled.append(np.zeros(32))
            continue
        amax = min(float(amax), float(np.finfo(F32).max))
        e = int(np.floor(np.log2(amax))) - emax if amax else -127
        exponents.append(int(np.clip(e, -127, 127)))
        scaled.append(block.astype(np.float64) * 2.0 ** -exponents[-1])
    return np.array(exponents), np.stack(scaled)


def awkward_floats(rng, shape, exponents=(-150, 128)):
    """Floats with exponents spread evenly over a range, zeros and both signs among them."""
    x = np.ldexp(rng.uniform(1, 2, shape), rng.integers(*exponents, shape))
    x *= rng.choice([-1, 1, 0, 1, -1], shape)
    return np.clip(x, -3.4e38, 3.4e38).astype(F32)
