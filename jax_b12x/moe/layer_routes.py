"""Where an MoE layer's tokens go: its router, and the routes to one device's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jax_b12x.moe import routing
from jax_b12x.moe.layer_params import LayerParams

if TYPE_CHECKING:
    from jax_b12x.moe.layer import MoELayer


def routes(
    layer: MoELayer, x: jax.Array, params: LayerParams, token_mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the routes to this device's experts.

    Args:
      layer: the layer.
      x: ``[num_tokens, hidden]``.
      params: this device's part.
      token_mask: ``bool[num_tokens]``, or ``None``.

    Returns:
      ``topk_ids`` and ``topk_weights``, of ``layer.local.top_k`` columns.
    """
    logits = lax.dot_general(
        x.astype(jnp.float32),
        params.router.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    if layer.router == "softmax":
        if params.router_bias is not None:
            logits = logits + params.router_bias
        ids, weights = routing.softmax_topk(
            logits, layer.top_k, renormalize=layer.renormalize, token_mask=token_mask
        )
    elif layer.router == "sigmoid":
        ids, weights = routing.sigmoid_topk(
            logits,
            layer.top_k,
            correction_bias=params.router_bias,
            num_groups=layer.num_groups,
            topk_groups=layer.topk_groups,
            renormalize=layer.renormalize,
            routed_scaling_factor=layer.routed_scaling_factor,
            token_mask=token_mask,
        )
    else:
        ids, weights = layer.router(logits, token_mask)
    if layer.expert_axis is None:
        return ids, weights
    count = layer.local.num_experts
    first = lax.axis_index(layer.expert_axis) * count
    return local_routes(ids, weights, num_experts=layer.num_experts, first=first, count=count)


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
      topk_ids: ``int32[num_tokens, top_k]``; those of a row that are not -1 differ.
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
