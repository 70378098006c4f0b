"""The parameters of an MoE layer as one pytree: router, routed experts, shared expert."""

from __future__ import annotations

import dataclasses

import jax

from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.weights import ExpertWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """What an MoE layer computes with.

    Attributes:
      router: ``f32|bf16|f16[num_experts, hidden]``: one row of logits' weights an expert.
      experts: the routed experts.
      shared: the expert that sees every token: :class:`~jax_b12x.moe.DenseExpert`, or packed
        :class:`~jax_b12x.moe.ExpertWeights` of one expert, or ``None``.
      router_bias: ``f32[num_experts]`` or ``None``: added to the logits of a softmax router
        (GPT-OSS); the correction bias of a sigmoid router, which takes part in choosing only.
      parts: how many devices experts and columns are split over: ``MoELayer.prepare`` sets it.
    """

    router: jax.Array
    experts: ExpertWeights
    shared: DenseExpert | ExpertWeights | None = None
    router_bias: jax.Array | None = None
    parts: tuple[int, int] = dataclasses.field(default=(1, 1), metadata={"static": True})
