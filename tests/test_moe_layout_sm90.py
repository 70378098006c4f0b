"""The Hopper weight layout: nothing is lost, and plans say what the launcher needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_inputs import random_weights

from jax_b12x import _native, capability
from jax_b12x.moe import ExpertWeights, layout_sm90
from jax_b12x.moe.plan import plan

H200 = capability.KNOWN["h200"]


def h200_plan(recipe, weights, **changes):
    facts = {
        "num_tokens": 4,
        "hidden": weights.hidden,
        "intermediate": weights.intermediate,
        "num_experts": weights.num_experts,
        "top_k": 2,
        "dtype": jnp.bfloat16,
        "weight_format": weights.format,
        "device": H200,
    }
    return plan(recipe, **{**facts, **changes})


def assert_same_bytes(a, b):
    for field in dataclasses.fields(ExpertWeights):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, jax.Array):
            assert left.dtype == right.dtype
            assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), field.name
        else:
            assert left == right


@pytest.mark.parametrize(
    ("hidden", "intermediate", "weight_format"),
    [(256, 128, "nvfp4"), (176, 48, "nvfp4"), (160, 96, "mxfp4"), (16, 16, "nvfp4")],
)
def test_unprepare_gives_the_checkpoint_bytes_back(hidden, intermediate, weight_format):
    rng = np.random.default_rng(hidden)
    weights = random_weights(
        rng,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=3,
        weight_format=weight_format,
        bias=True,
    )
    prepared = weights.prepare(h200_plan("w4a16", weights))
    assert prepared.layout == "sm90"
    assert prepared.w13.shape == (
        3,
        2 * -(-intermediate // 16),
        -(-hidden // 128),
        layout_sm90.TILE_BYTES,
    )
    assert_same_bytes(prepared.unprepare(), weights)


def test_a_tile_holds_each_code_and_scale_where_its_lane_looks_for_it():
    """Decodes a tile with the arithmetic of the kernels, one lane at a time."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (16, 128), dtype=np.uint8)
    scales = rng.integers(0, 127, (16, 8), dtype=np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    tile = np.asarray(
        layout_sm90.pack(
            jnp.asarray(packed)[None],
            jnp.asarray(scales).view(jnp.float8_e4m3fn)[None],
            gated=False,
        )
    ).reshape(-1)
    words = tile[:1024].view(np.uint32).reshape(2, 32, 2, 2)  # pair of steps, lane, half, step
    scale_words = tile[1024:].view(np.uint32).reshape(8, 2, 2)  # g, half of a step, pair

    def rotate_right(word, by):
        return ((int(word) >> by) | (int(word) << (32 - by))) & 0xFFFFFFFF

    def pair_codes(word):
        return [(half >> 12 & 8) | (half >> 6 & 7) for half in (word & 0xFFFF, word >> 16)]

    for lane in range(32):
        g, t = divmod(lane, 4)
        for pair_of_steps in range(2):
            for half in range(2):
                w0, w1 = (int(w) for w in words[pair_of_steps, lane, half])
                joined = (w0 & 0x06030603) | ((w1 << 2) & 0xFFFFFFFF & ~0x06030603)
                last = (rotate_right(joined, 4), joined << 6 & 0xFFFFFFFF)
                for step, word in enumerate((w0, w1)):
                    pairs = (word, word << 4, rotate_right(word, 6), last[step])
                    decoded = [code for p in pairs for code in pair_codes(p & 0x81C081C0)]
                    column = 64 * pair_of_steps + 32 * step + 8 * t
                    assert decoded == list(codes[g + 8 * half, column : column + 8])
            word = int(scale_words[g, t // 2, pair_of_steps])
            swapped = (word & 0x00FF00FF) << 8 | (word >> 8 & 0x00FF00FF)
            for half, source in enumerate((word, swapped)):
                for step in range(2):
                    block = 2 * (2 * pair_of_steps + step) + t // 2
                    assert source >> (16 * step) >> 4 & 0xFF == scales[g + 8 * half, block]


def test_prepare_refuses_block_scales_that_are_negative_or_nan():
    weights = random_weights(np.random.default_rng(0), hidden=64, intermediate=32, num_experts=3)
    for bad in (0x7F, 0x81):
        bits = np.array(weights.w2_scale).view(np.uint8)
        bits[1, 0, 0] = bad
        broken = dataclasses.replace(weights, w2_scale=jnp.asarray(bits).view(jnp.float8_e4m3fn))
        with pytest.raises(ValueError, match=r"w2_scale of expert 1 .* negative or NaN"):
            broken.prepare(h200_plan("w4a16", weights))


def test_prepare_refuses_a_plan_for_other_weights():
    weights = random_weights(np.random.default_rng(0), hidden=64, intermediate=32, num_experts=3)
    with pytest.raises(ValueError, match="hidden is 64, but the plan was made for 128"):
        weights.prepare(h200_plan("w4a16", weights, hidden=128))


def test_prepare_gives_the_same_object_where_nothing_is_to_be_done():
    weights = random_weights(np.random.default_rng(0), hidden=64, intermediate=32, num_experts=3)
    prepared = weights.prepare(h200_plan("w4a16", weights))
    assert prepared.prepare(h200_plan("nvfp4", weights)) is prepared
    assert weights.prepare(h200_plan("w4a16", weights, device=capability.CPU)) is weights


def test_fused_and_split_plans_sum_in_the_same_order():
    weights = random_weights(np.random.default_rng(0), hidden=64, intermediate=32, num_experts=3)
    fused = h200_plan("nvfp4", weights, implementation="fused")
    split = h200_plan("nvfp4", weights, implementation="split")
    assert fused.geometry == split.geometry


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": jnp.float32}, "cast x to bfloat16"),
        ({"dtype": jnp.float16, "weight_format": "mxfp4"}, "mxfp4 scales do not fit in float16"),
        ({"top_k": 17, "num_experts": 32}, "top_k is 17; kernels take at most 16"),
        ({"num_experts": 2000}, "num_experts is 2000; kernels take at most 1024"),
        ({"device": dataclasses.replace(H200, sm=120)}, "sm_90 .* only, and the device is sm_120"),
    ],
)
def test_what_has_no_cuda_kernel_is_refused_with_the_reason(changes, why):
    weights = random_weights(np.random.default_rng(0), hidden=64, intermediate=32, num_experts=3)
    with pytest.raises(ValueError, match=why):
        h200_plan("w4a16", weights, **changes)


@pytest.mark.skipif(_native.cuda() is None, reason="the CUDA half is not built")
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 64, 200])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "num_experts", "top_k"),
    [(2048, 768, 128, 8), (6144, 256, 256, 8), (2880, 2880, 32, 4), (7168, 2048, 256, 16)],
)
def test_plans_and_the_launcher_agree_on_memory(
    recipe, num_tokens, hidden, intermediate, num_experts, top_k
):
    made = plan(
        recipe,
        num_tokens=num_tokens,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        dtype=jnp.bfloat16,
        device=H200,
    )
    scratch, shared = _native.cuda().moe_decode_bytes(
        num_tokens=num_tokens,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        quantized=recipe == "nvfp4",
        **dict(made.geometry),
    )
    assert scratch == made.scratch_bytes
    assert shared <= H200.shared_memory_bytes
