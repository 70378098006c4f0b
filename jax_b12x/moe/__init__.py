"""Mixture of experts: recipes, plans, weights, routing and the op."""

from jax_b12x.moe import reference, routing
from jax_b12x.moe.block import TARGET as BLOCK_TARGET
from jax_b12x.moe.block import BlockResult, RouterParams, moe_block, record_launches
from jax_b12x.moe.block_plan import BlockOrder, BlockPlan, DensePlan, plan_block
from jax_b12x.moe.checkpoint import (
    Checkpoint,
    CheckpointError,
    activation_of,
    list_moe_layers,
    load_experts,
    save_experts,
)
from jax_b12x.moe.dense import DenseExpert, dense_mlp
from jax_b12x.moe.joined import JoinedExpert
from jax_b12x.moe.layer import MoELayer
from jax_b12x.moe.layer_params import LayerParams
from jax_b12x.moe.layer_plan import LayerPlan
from jax_b12x.moe.op import TARGET, fused_moe
from jax_b12x.moe.plan import Implementation, MoePlan, Overlap, plan
from jax_b12x.moe.recipe import RECIPES, SILU, SWIGLU_OAI, Activation, Recipe, get_recipe
from jax_b12x.moe.weights import ExpertWeights

__all__ = [
    "BLOCK_TARGET",
    "RECIPES",
    "SILU",
    "SWIGLU_OAI",
    "TARGET",
    "Activation",
    "BlockOrder",
    "BlockPlan",
    "BlockResult",
    "Checkpoint",
    "CheckpointError",
    "DenseExpert",
    "DensePlan",
    "ExpertWeights",
    "Implementation",
    "JoinedExpert",
    "LayerParams",
    "LayerPlan",
    "MoELayer",
    "MoePlan",
    "Overlap",
    "Recipe",
    "RouterParams",
    "activation_of",
    "dense_mlp",
    "fused_moe",
    "get_recipe",
    "list_moe_layers",
    "load_experts",
    "moe_block",
    "plan",
    "plan_block",
    "record_launches",
    "reference",
    "routing",
    "save_experts",
]
