"""One small call of every launch path, for compute-sanitizer; see sanitize.sh."""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from moe_inputs import random_tokens, random_weights

from jax_b12x import moe

rng = np.random.default_rng(0)
for weight_format, recipes in (("nvfp4", ("w4a16", "nvfp4")), ("mxfp4", ("w4a16",))):
    weights = random_weights(
        rng, hidden=288, intermediate=160, num_experts=6, weight_format=weight_format, bias=True
    )
    for recipe in recipes:
        for num_tokens in (1, 3, 12):
            for implementation in ("fused", "split"):
                x, ids, route = random_tokens(
                    rng, num_tokens=num_tokens, hidden=288, num_experts=6, top_k=2, dtype="bfloat16"
                )
                plan = moe.plan(
                    recipe,
                    num_tokens=num_tokens,
                    hidden=288,
                    intermediate=160,
                    num_experts=6,
                    top_k=2,
                    dtype=x.dtype,
                    weight_format=weight_format,
                    implementation=implementation,
                )
                out = moe.fused_moe(x, weights.prepare(plan), ids, route, plan=plan)
                assert np.isfinite(np.asarray(out, np.float32)).all()
                print(weight_format, recipe, num_tokens, implementation, "ran", flush=True)

# Blocks: the router and a dense shared expert besides, forked where the plan allows it.
weights = random_weights(rng, hidden=288, intermediate=160, num_experts=6)
router = moe.RouterParams(jnp.asarray(rng.normal(size=(6, 288)), jnp.bfloat16))
shared = moe.DenseExpert(
    jnp.asarray(rng.normal(size=(2 * 176, 288)) / 17, jnp.bfloat16),
    jnp.asarray(rng.normal(size=(288, 176)) / 13, jnp.bfloat16),
)
for num_tokens in (1, 3, 12):
    for implementation in ("fused", "split"):
        x = jnp.asarray(rng.normal(size=(num_tokens, 288)), jnp.bfloat16)
        routed = moe.plan(
            "nvfp4",
            num_tokens=num_tokens,
            hidden=288,
            intermediate=160,
            num_experts=6,
            top_k=2,
            dtype=x.dtype,
            implementation=implementation,
        )
        block = moe.plan_block(routed, router=True, shared=moe.DensePlan(176))
        out, _, _ = moe.moe_block(
            x, weights.prepare(routed), router=router, shared=shared, plan=block
        )
        assert np.isfinite(np.asarray(out, np.float32)).all()
        print("block", num_tokens, implementation, block.order, "ran", flush=True)
