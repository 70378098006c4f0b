"""Flax NNX modules: a mixture-of-experts block, trained dense and served packed."""

from jax_b12x.flax.experts import PackedExperts, TrainableExperts
from jax_b12x.flax.layer import MoELayer
from jax_b12x.flax.moe import MoE, Routing, SwiGLU

__all__ = ["MoE", "MoELayer", "PackedExperts", "Routing", "SwiGLU", "TrainableExperts"]
