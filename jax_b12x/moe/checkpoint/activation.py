"""``activation_of``: the activation between the experts' products that a model's config names."""

from __future__ import annotations

import dataclasses
import os

from jax_b12x.moe.checkpoint.files import Checkpoint
from jax_b12x.moe.checkpoint.safetensors_file import CheckpointError
from jax_b12x.moe.recipe import SILU, SWIGLU_OAI, Activation

_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act")


def activation_of(checkpoint: Checkpoint | str | os.PathLike[str]) -> Activation:
    """Returns the activation that ``config.json`` names, for ``fused_moe``'s ``activation``.

    A GPT-OSS model (``model_type``) has :data:`SWIGLU_OAI` with its ``swiglu_limit``; its
    ``hidden_act`` of ``silu`` says less than that. Other models have what ``hidden_act`` says.

    Args:
      checkpoint: an open checkpoint, or the path of a file or directory.

    Raises:
      CheckpointError: it cannot be opened; ``config.json`` is missing, names no activation, or one
        that ``fused_moe`` does not compute.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    config = checkpoint.config()
    text = config.get("text_config")
    section = text if isinstance(text, dict) else config
    where = f"config.json of {checkpoint.path}"
    limit = section.get("swiglu_limit")
    if "gpt_oss" in (config.get("model_type"), section.get("model_type")):
        if limit is None:
            return SWIGLU_OAI
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise CheckpointError(f"{where} says swiglu_limit {limit!r}; it must be positive")
        return dataclasses.replace(SWIGLU_OAI, limit=float(limit))
    key, name = next(
        ((key, section[key]) for key in _KEYS if section.get(key) is not None), ("", None)
    )
    known = "fused_moe computes silu, and GPT-OSS's SwiGLU for models whose model_type is gpt_oss"
    if name is None:
        raise CheckpointError(f"{where} is missing or names no activation (hidden_act); {known}")
    if name not in ("silu", "swish"):
        raise CheckpointError(f"{where} says {key} {name!r}; {known}")
    if limit is not None:
        raise CheckpointError(f"{where} says {key} {name!r} with swiglu_limit {limit!r}; {known}")
    return SILU
