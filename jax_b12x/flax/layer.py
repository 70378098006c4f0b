"""``MoELayer`` as a Flax NNX module: what serves, on one device or a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_b12x import comm, moe
from jax_b12x.arguments import what
from jax_b12x.flax.experts import PackedExperts
from jax_b12x.flax.moe import MoE
from jax_b12x.moe import layer_checks


class MoELayer(nnx.Module):
    """A mixture-of-experts layer to serve with: :class:`jax_b12x.moe.MoELayer` and its parameters.

    ::

        layer = MoELayer.of(block.moe, mesh=mesh, tensor_axis="tp", pool=pool)
        y = layer(x)

    It is inference-only. Its parameters are no ``nnx.Param``: to ``nnx.grad`` and ``nnx.Optimizer``
    there is nothing of it to train, so that of a module of nothing else they have an empty state.
    A gradient with respect to ``x`` is an error.

    Attributes:
      layer: what is computed, and how it is split.
      params: an ``nnx.Variable`` that holds the :class:`jax_b12x.moe.LayerParams`.
      pool: the channels of the layer's axes, or ``None``.
    """

    # What nnx.jit(layer) is called in profiles and records.
    __name__ = "moe_layer"

    def __init__(
        self,
        layer: moe.MoELayer,
        params: moe.LayerParams,
        *,
        pool: comm.ChannelPool | None = None,
    ) -> None:
        """Prepares the parameters: splits them over the mesh, in its devices' layout.

        Args:
          layer: what is computed.
          params: of the whole layer.
          pool: the channels of the layer's axes; one pool serves all layers of a model.

        Raises:
          TypeError: an argument is of another type.
          ValueError: the parameters or the pool are not those of the layer.
        """
        if not isinstance(layer, moe.MoELayer):
            raise TypeError(f"layer is {what(layer)}; it must be a moe.MoELayer")
        if pool is not None:
            layer_checks.check_pool(layer, pool)
        self.layer = layer
        self.params = nnx.Variable(layer.prepare(params))
        self.pool = pool

    @classmethod
    def of(
        cls,
        block: MoE,
        *,
        dtype: DTypeLike | None = None,
        pool: comm.ChannelPool | None = None,
        **fields: Any,
    ) -> MoELayer:
        """Returns the layer that serves what a trained block, with packed experts, computes.

        Args:
          block: its experts must be :class:`PackedExperts`.
          dtype: of ``x``; a shared expert's kernels are rounded to it once, here. That of its
            products if not given, and where they have none, that of its kernels.
          pool: the channels of the layer's axes.
          **fields: further fields of :class:`jax_b12x.moe.MoELayer`: ``mesh``, ``tensor_axis``,
            ``expert_axis``, ``overlap``.

        Raises:
          TypeError: ``block`` is no :class:`MoE`, or its experts are not packed.
        """
        if not isinstance(block, MoE):
            raise TypeError(f"block is {what(block)}; it must be a jax_b12x.flax.MoE")
        if not isinstance(block.experts, PackedExperts):
            raise TypeError(
                f"the block's experts are {type(block.experts).__name__}; a layer that serves "
                "needs PackedExperts"
            )
        experts: moe.ExpertWeights = block.experts.weights.get_value()
        shared = None
        if block.shared is not None:
            gate_up, down = block.shared.gate_up, block.shared.down
            shared = moe.DenseExpert(gate_up.kernel[...].T, down.kernel[...].T)
            shared = shared.astype(dtype or gate_up.dtype or gate_up.kernel.dtype)
        layer = moe.MoELayer(
            hidden=experts.hidden,
            intermediate=experts.intermediate,
            num_experts=experts.num_experts,
            top_k=block.top_k,
            shared_intermediate=0 if shared is None else shared.intermediate,
            recipe=block.experts.recipe,
            weight_format=experts.format,
            **fields,
        )
        router = jnp.asarray(block.router.kernel[...].T)
        return cls(layer, moe.LayerParams(router, experts, shared), pool=pool)

    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
        """Returns the layer's output; see :class:`jax_b12x.moe.MoELayer`.

        Args:
          x: ``[num_tokens, hidden]``.
          token_mask: ``bool[num_tokens]``; the others are padding.
        """
        return self.layer(x, self.params.get_value(), pool=self.pool, token_mask=token_mask)

    def add_norm(
        self,
        x: jax.Array,
        residual: jax.Array,
        norm_weight: jax.Array,
        eps: float,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns ``(normed, new_residual)``; see :meth:`jax_b12x.moe.MoELayer.add_norm`."""
        params: moe.LayerParams = self.params.get_value()
        return self.layer.add_norm(
            x, params, residual, norm_weight, eps, pool=self.pool, token_mask=token_mask
        )
