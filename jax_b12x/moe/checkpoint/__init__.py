"""Checkpoints of quantized experts in safetensors, in the layouts that people have."""

from jax_b12x.moe.checkpoint.activation import activation_of
from jax_b12x.moe.checkpoint.files import Checkpoint
from jax_b12x.moe.checkpoint.layout import list_moe_layers
from jax_b12x.moe.checkpoint.load import load_experts
from jax_b12x.moe.checkpoint.safetensors_file import CheckpointError
from jax_b12x.moe.checkpoint.save import save_experts

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "activation_of",
    "list_moe_layers",
    "load_experts",
    "save_experts",
]
