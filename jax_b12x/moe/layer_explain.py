"""What an MoE layer chose and why, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jax_b12x.moe.layer_plan import LayerPlan

if TYPE_CHECKING:
    from jax_b12x.moe.layer import MoELayer


def explain(layer: MoELayer, made: LayerPlan) -> str:
    """Returns the text of a layer and its plan."""
    local = layer.local
    router = layer.router if isinstance(layer.router, str) else "custom"
    axes = ", ".join(
        f"{what} over {axis!r} ({layer.parts(axis)})"
        for what, axis in (("experts", layer.expert_axis), ("columns", layer.tensor_axis))
        if axis is not None
    )
    a_rank = made.routed.num_tokens * layer.hidden * jnp.dtype(made.routed.dtype).itemsize
    reduction = f"one, of {layer.world_size} ranks, {a_rank:,} bytes each" if axes else "none"
    lines = [
        f"MoE layer of {layer.num_experts} experts of {layer.hidden} x {layer.intermediate}, "
        f"{router} top-{layer.top_k}",
        f"  split           {axes or 'not split'}",
        f"  a device has    {local.num_experts} experts of {local.hidden} x "
        f"{local.intermediate}"
        + (f", shared {local.shared_intermediate}" if layer.shared_intermediate else ""),
        f"  routed experts  {made.routed.implementation}, overlap {made.routed.overlap}",
        f"  shared expert   {layer.shared_format if layer.shared_intermediate else 'none'}"
        + (", joined to the routed ones" if made.joined else ""),
        f"  order           {made.order}",
        f"  reduction       {reduction}",
        *(["  because"] if made.reasons else []),
        *(f"    - {reason}" for reason in made.reasons),
        (made.block or made.routed).explain(),
    ]
    return "\n".join(lines)
