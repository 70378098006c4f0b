"""Small calls of every launch path, for compute-sanitizer; see sanitize.sh.

Usage: sanitize_cases.py group. Without a group: prints their names.
"""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from moe_inputs import random_tokens, random_weights

from jax_b12x import moe

HIDDEN, INTERMEDIATE, SHARED, EXPERTS, TOP_K = 288, 160, 176, 6, 2


def run_moe(weight_format, recipe):
    """Odd sizes, a bias, one token and several, fused and split."""
    rng = np.random.default_rng(0)
    weights = random_weights(
        rng,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        weight_format=weight_format,
        bias=True,
    )
    for num_tokens in (1, 3, 12):
        for implementation in ("fused", "split"):
            x, ids, route = random_tokens(
                rng,
                num_tokens=num_tokens,
                hidden=HIDDEN,
                num_experts=EXPERTS,
                top_k=TOP_K,
                dtype="bfloat16",
            )
            plan = moe.plan(
                recipe,
                num_tokens=num_tokens,
                hidden=HIDDEN,
                intermediate=INTERMEDIATE,
                num_experts=EXPERTS,
                top_k=TOP_K,
                dtype=x.dtype,
                weight_format=weight_format,
                implementation=implementation,
            )
            out = moe.fused_moe(x, weights.prepare(plan), ids, route, plan=plan)
            assert np.isfinite(np.asarray(out, np.float32)).all()
            print(num_tokens, implementation, "ran", flush=True)


def run_block():
    """The router and a dense shared expert besides, forked where the plan allows it."""
    rng = np.random.default_rng(1)
    weights = random_weights(
        rng, hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, bias=False
    )
    router = moe.RouterParams(jnp.asarray(rng.normal(size=(EXPERTS, HIDDEN)), jnp.bfloat16))
    shared = moe.DenseExpert(
        jnp.asarray(rng.normal(size=(2 * SHARED, HIDDEN)) / 17, jnp.bfloat16),
        jnp.asarray(rng.normal(size=(HIDDEN, SHARED)) / 13, jnp.bfloat16),
    )
    for num_tokens in (1, 3, 12):
        for implementation in ("fused", "split"):
            x = jnp.asarray(rng.normal(size=(num_tokens, HIDDEN)), jnp.bfloat16)
            routed = moe.plan(
                "nvfp4",
                num_tokens=num_tokens,
                hidden=HIDDEN,
                intermediate=INTERMEDIATE,
                num_experts=EXPERTS,
                top_k=TOP_K,
                dtype=x.dtype,
                implementation=implementation,
            )
            block = moe.plan_block(routed, router=True, shared=moe.DensePlan(SHARED))
            out, _, _ = moe.moe_block(
                x, weights.prepare(routed), router=router, shared=shared, plan=block
            )
            assert np.isfinite(np.asarray(out, np.float32)).all()
            print(num_tokens, implementation, block.order, "ran", flush=True)


GROUPS = {
    "w4a16": lambda: run_moe("nvfp4", "w4a16"),
    "nvfp4": lambda: run_moe("nvfp4", "nvfp4"),
    "mxfp4": lambda: run_moe("mxfp4", "w4a16"),
    "block": run_block,
}

if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(*GROUPS)
    else:
        GROUPS[sys.argv[1]]()
