"""Where an MoE layer's tokens go: its router, and the routes to one device's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jax_b12x.moe import routing
from jax_b12x.moe.block import RouterParams
from jax_b12x.moe.layer_params import LayerParams

if TYPE_CHECKING:
    from jax_b12x.moe.layer import MoELayer


def fits_kernel(layer: MoELayer) -> bool:
    """Returns whether the router op can route for a layer: few tokens aside."""
    return (
        isinstance(layer.router, str)
        and layer.top_k <= routing.MAX_TOP_K
        and layer.num_experts <= routing.MAX_EXPERTS
    )


def in_block(layer: MoELayer, params: LayerParams) -> RouterParams:
    """Returns the layer's router as a block takes it."""
    assert layer.router == "softmax" or layer.router == "sigmoid"
    return RouterParams(
        weight=params.router,
        bias=params.router_bias,
        scoring=layer.router,
        renormalize=layer.renormalize,
        scale=layer.routed_scaling_factor,
        num_groups=layer.num_groups,
        topk_groups=layer.topk_groups,
    )


def routes(
    layer: MoELayer,
    x: jax.Array,
    params: LayerParams,
    token_mask: jax.Array | None,
    *,
    decode: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the routes to this device's experts.

    Args:
      layer: the layer.
      x: ``[num_tokens, hidden]``.
      params: this device's part.
      token_mask: ``bool[num_tokens]``, or ``None``.
      decode: whether the tokens are few, so that one launch beats XLA's products.

    Returns:
      ``topk_ids`` and ``topk_weights``, of ``layer.local.top_k`` columns and one for each expert
      that a joined shared expert is.
    """
    ids, weights = _routed(layer, x, params, token_mask, decode=decode)
    return routing.with_joined(ids, weights, layer.local.num_experts, params.joined)


def _routed(
    layer: MoELayer,
    x: jax.Array,
    params: LayerParams,
    token_mask: jax.Array | None,
    *,
    decode: bool,
) -> tuple[jax.Array, jax.Array]:
    if layer.router == "softmax" or layer.router == "sigmoid":
        route = routing.route if decode and fits_kernel(layer) else routing.route_reference
        ids, weights, _ = route(
            x,
            params.router,
            params.router_bias,
            top_k=layer.top_k,
            scoring=layer.router,
            renormalize=layer.renormalize,
            scale=layer.routed_scaling_factor,
            num_groups=layer.num_groups,
            topk_groups=layer.topk_groups,
            token_mask=token_mask,
        )
    else:
        wide, weight = x.astype(jnp.float32), params.router.astype(jnp.float32)
        logits = jnp.matmul(wide, weight.T, precision=lax.Precision.HIGHEST)
        ids, weights = _of_custom(layer, layer.router(logits, token_mask), x.shape[0])
        if layer.local.num_experts < layer.top_k:
            # A device has a place for each of its experts, and a route more would find none.
            ids, weights = _once(ids, weights)
    if layer.expert_axis is None:
        return ids, weights
    count = layer.local.num_experts
    first = lax.axis_index(layer.expert_axis) * count
    return local_routes(ids, weights, num_experts=layer.num_experts, first=first, count=count)


def _of_custom(layer: MoELayer, routed: object, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Checks what a router of the user's returned, before any of it is left out."""
    shape = (num_tokens, layer.top_k)
    wanted = f"(topk_ids int32{list(shape)}, topk_weights float32{list(shape)})"
    if not isinstance(routed, tuple | list) or len(routed) != 2:
        raise TypeError(f"router returned {type(routed).__name__}; it must return {wanted}")
    for name, array, dtype in zip(
        ("topk_ids", "topk_weights"), routed, (jnp.int32, jnp.float32), strict=True
    ):
        if not isinstance(array, jax.Array):
            raise ValueError(f"router returned {name} as no array; it must return {wanted}")
        if array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"router returned {name} as {found}; it must return {wanted}")
    return routed[0], routed[1]


def _once(topk_ids: jax.Array, topk_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins a row's routes to one expert: the first has the sum of their weights, others -1."""
    same = topk_ids[:, :, None] == topk_ids[:, None, :]
    earlier = jnp.tril(jnp.ones(same.shape[1:], jnp.bool_), -1)
    weights = jnp.sum(jnp.where(same, topk_weights[:, None, :], 0), axis=2)
    return jnp.where(jnp.any(same & earlier, axis=2), routing.PADDING, topk_ids), weights


def local_routes(
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    *,
    num_experts: int,
    first: jax.typing.ArrayLike,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the routes to the experts ``[first, first + count)``, counted from ``first``.

    Other routes become -1, which contributes nothing and reads nothing; so do ids outside
    ``[0, num_experts)``, which would otherwise meet the padding of the last device. Where there are
    more routes than experts, those that are left come first, in their order.

    Args:
      topk_ids: ``int32[num_tokens, top_k]``; where ``top_k > count``, those of a row that are not
        -1 differ.
      topk_weights: ``f32[num_tokens, top_k]``.
      num_experts: experts of the layer.
      first: the device's first expert.
      count: the device's experts.

    Returns:
      Both, of ``min(top_k, count)`` columns.
    """
    shifted = topk_ids - jnp.asarray(first, topk_ids.dtype)
    own = (topk_ids < num_experts) & (shifted >= 0) & (shifted < count)
    ids = jnp.where(own, shifted, routing.PADDING)
    if topk_ids.shape[1] <= count:
        return ids, topk_weights
    order = jnp.argsort(~own, axis=1, stable=True)[:, :count]
    return jnp.take_along_axis(ids, order, 1), jnp.take_along_axis(topk_weights, order, 1)
