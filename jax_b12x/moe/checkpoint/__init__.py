"""Checkpoints of quantized experts in safetensors, in the layouts that people have."""

from jax_b12x.moe.checkpoint.files import Checkpoint
from jax_b12x.moe.checkpoint.layout import list_moe_layers
from jax_b12x.moe.checkpoint.load import load_experts
from jax_b12x.moe.checkpoint.safetensors_file import CheckpointError
from jax_b12x.moe.checkpoint.save import save_experts

__all__ = ["Checkpoint", "CheckpointError", "list_moe_layers", "load_experts", "save_experts"]
