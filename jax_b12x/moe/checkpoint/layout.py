"""Recognises how a checkpoint names and arranges the tensors of one MoE layer.

Tensors are named ``{prefix}.{expert}.{projection}.{part}``, or, stacked over experts,
``{prefix}.{projection}`` with the part behind a dot or an underscore:

==================  ==========================================  =================
convention          parts of a projection                       published as
==================  ==========================================  =================
modelopt            weight (or nothing), weight_scale,          NVIDIA ModelOpt
                    weight_scale_2, input_scale
compressed-tensors  weight_packed, weight_scale,                LLM Compressor
                    weight_global_scale, input_global_scale
mxfp4               blocks, scales                              GPT-OSS
==================  ==========================================  =================

Each may have a ``bias``. Projections are ``gate_proj``, ``up_proj``, ``down_proj``, or ``w1``,
``w3``, ``w2`` of the same meaning; ``gate_up_proj`` or ``w13`` holds the rows of gate and up.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

from jax_b12x.moe.checkpoint.files import Checkpoint
from jax_b12x.moe.checkpoint.safetensors_file import CheckpointError, Tensor

Convention = Literal["modelopt", "compressed-tensors", "mxfp4"]
Projection = Literal["gate", "up", "gate_up", "down"]
Part = Literal["weight", "scale", "global_scale", "input_scale", "bias"]

_PROJECTIONS: dict[str, Projection] = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "gate_up_proj": "gate_up",
    "w13": "gate_up",
    "down_proj": "down",
    "w2": "down",
}
_MODELOPT: tuple[Convention, ...] = ("modelopt",)
_COMPRESSED: tuple[Convention, ...] = ("compressed-tensors",)
_MXFP4: tuple[Convention, ...] = ("mxfp4",)
_PARTS: dict[str, tuple[Part, tuple[Convention, ...]]] = {
    "": ("weight", _MODELOPT),
    "weight": ("weight", _MODELOPT),
    "weight_scale": ("scale", _MODELOPT + _COMPRESSED),
    "weight_scale_2": ("global_scale", _MODELOPT),
    "input_scale": ("input_scale", _MODELOPT),
    "weight_packed": ("weight", _COMPRESSED),
    "weight_global_scale": ("global_scale", _COMPRESSED),
    "input_global_scale": ("input_scale", _COMPRESSED),
    "blocks": ("weight", _MXFP4),
    "scales": ("scale", _MXFP4),
    "bias": ("bias", _MODELOPT + _COMPRESSED + _MXFP4),
}
_NAME = re.compile(
    r"(?:(?P<expert>\d+)\.)?(?P<projection>" + "|".join(_PROJECTIONS) + r")(?:[._](?P<part>\w+))?"
)
_LAYER = re.compile(r"(?P<prefix>(?:.+\.)?experts)\." + _NAME.pattern)

Key = tuple[int | None, Projection, Part]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensors of one MoE layer.

    Attributes:
      prefix: what their names start with.
      convention: whose layout it is.
      stacked: whether tensors are stacked over experts.
      fused: whether gate and up share a tensor.
      num_experts: how many experts there are.
      tensors: by expert (``None`` where stacked), projection and part.
    """

    prefix: str
    convention: Convention
    stacked: bool
    fused: bool
    num_experts: int
    tensors: dict[Key, Tensor]

    @property
    def experts(self) -> tuple[int | None, ...]:
        """The first items of the keys."""
        return (None,) if self.stacked else tuple(range(self.num_experts))

    @property
    def first_projections(self) -> tuple[Projection, ...]:
        """The projections that make up w13, in the order of its rows."""
        return ("gate_up",) if self.fused else ("gate", "up")

    def get(self, expert: int | None, projection: Projection, part: Part) -> Tensor:
        """Returns a tensor that must be there.

        Raises:
          CheckpointError: it is not.
        """
        tensor = self.tensors.get((expert, projection, part))
        if tensor is None:
            kin = next(iter(self.tensors.values()))
            raise CheckpointError(
                f"{self._name(expert, projection, part)} is missing from this {self.convention} "
                f"checkpoint, which has {kin}"
            )
        return tensor

    def _name(self, expert: int | None, projection: Projection, part: Part) -> str:
        """Returns the name that a tensor would have, after the names of its kin."""
        word = next(w for w, p in _PROJECTIONS.items() if p == projection)
        dot = not self.stacked
        for key, kin in self.tensors.items():
            match = _NAME.fullmatch(kin.name[len(self.prefix) + 1 :])
            if match and key[1] == projection:
                word = match["projection"]
            dot = dot or f"{match['projection'] if match else ''}." in kin.name
        suffix = next(w for w, (p, c) in _PARTS.items() if w and p == part and self.convention in c)
        stem = self.prefix if expert is None else f"{self.prefix}.{expert}"
        return f"{stem}.{word}{'.' if dot else '_'}{suffix}"


def list_moe_layers(checkpoint: Checkpoint | str | os.PathLike[str]) -> tuple[str, ...]:
    """Returns the prefixes of a checkpoint's routed experts, in the order of their layers.

    Args:
      checkpoint: an open checkpoint, or the path of a file or directory.

    Raises:
      CheckpointError: it cannot be opened.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    found = {match["prefix"] for name in checkpoint.names if (match := _LAYER.fullmatch(name))}
    return tuple(sorted(found, key=_natural))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(s), "") if s.isdigit() else (-1, s) for s in re.split(r"(\d+)", name)]


def find_layout(checkpoint: Checkpoint, prefix: str) -> Layout:
    """Recognises the layout of one MoE layer from the names of its tensors.

    Args:
      checkpoint: where to look.
      prefix: such as ``"model.layers.3.mlp.experts"``.

    Raises:
      CheckpointError: there are no such experts; a tensor's name is not understood; two layouts are
        mixed; an expert is missing.
    """
    tensors: dict[Key, Tensor] = {}
    conventions: set[Convention] = {"modelopt", "compressed-tensors", "mxfp4"}
    for name in checkpoint.names:
        if not name.startswith(prefix + "."):
            continue
        match = _NAME.fullmatch(name[len(prefix) + 1 :])
        if match is None:
            _check_prefix_is_not_too_short(checkpoint, prefix)
        tensor = checkpoint.tensor(name)
        if match is None or (match["part"] or "") not in _PARTS:
            raise tensor.error("this is no tensor that load_experts knows")
        part, allowed = _PARTS[match["part"] or ""]
        if part == "weight" and tensor.dtype != "U8":
            raise tensor.error(
                "it is not packed (U8); ExpertWeights.quantize makes NVFP4 of dense weights"
            )
        if not conventions & set(allowed):
            raise tensor.error(
                f"it belongs to the {allowed[0]} layout; the tensors before it are those of "
                f"{' or '.join(sorted(conventions))}"
            )
        conventions &= set(allowed)
        key = (
            int(match["expert"]) if match["expert"] else None,
            _PROJECTIONS[match["projection"]],
            part,
        )
        if key in tensors:
            raise tensor.error(f"it says the same as {tensors[key]}")
        tensors[key] = tensor
    if not tensors:
        shown = _some(list_moe_layers(checkpoint))
        raise CheckpointError(
            f"{checkpoint.path} has no tensors under {prefix!r}; its experts are under "
            f"{shown or 'no name that is known'}"
        )
    if len(conventions) > 1:
        raise CheckpointError(
            f"{prefix}: no packed weights among {next(iter(tensors.values()))}, ..."
        )
    return _arrange(prefix, conventions.pop(), tensors)


def _check_prefix_is_not_too_short(checkpoint: Checkpoint, prefix: str) -> None:
    layers = list_moe_layers(checkpoint)
    longer = [layer for layer in layers if layer.startswith(prefix + ".")]
    if longer and prefix not in layers:
        raise CheckpointError(
            f"prefix {prefix!r} is too short; it should be {_some(longer)} (in {checkpoint.path})"
        )


def _some(layers: Sequence[str]) -> str:
    return ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")


def _arrange(prefix: str, convention: Convention, tensors: dict[Key, Tensor]) -> Layout:
    stacked = _one_of_two(tensors, lambda key: key[0] is None, "stacked over experts")
    fused = _one_of_two(
        {key: t for key, t in tensors.items() if key[1] != "down"},
        lambda key: key[1] == "gate_up",
        "gate and up in one",
    )
    if stacked:
        stack = next(t for key, t in tensors.items() if key[2] == "weight")
        num_experts = stack.shape[0] if stack.shape else 0
    else:
        num_experts = 1 + max(expert for expert, _, _ in tensors if expert is not None)
    if num_experts == 0:
        raise CheckpointError(f"{prefix}: has no experts")
    return Layout(prefix, convention, stacked, fused, num_experts, tensors)


def _one_of_two(tensors: dict[Key, Tensor], test: Any, words: str) -> bool:
    yes = [tensor for key, tensor in tensors.items() if test(key)]
    no = [tensor for key, tensor in tensors.items() if not test(key)]
    if yes and no:
        raise no[0].error(f"it is mixed with {yes[0]}, which is {words}")
    return bool(yes)


def _num_bits(quantization: dict[str, Any]) -> Any:
    """Returns the first ``num_bits`` of compressed-tensors' weights that is not 4, else 4."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        num_bits = weights.get("num_bits", 4) if isinstance(weights, dict) else 4
        if num_bits != 4:
            return num_bits
    return 4


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_config(checkpoint: Checkpoint, layout: Layout) -> dict[str, Any]:
    """Checks what ``config.json`` says against the tensors, and returns it.

    Raises:
      CheckpointError: it declares another quantization, or another number of experts.
    """
    config = checkpoint.config()
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in _NUM_EXPERTS:
            if section.get(key) not in (None, layout.num_experts):
                raise CheckpointError(
                    f"{layout.prefix} has {layout.num_experts} experts; config.json of "
                    f"{checkpoint.path} says {key} {section[key]}"
                )
    declared = _declared(checkpoint, config)
    if declared not in (None, layout.convention):
        raise CheckpointError(
            f"config.json of {checkpoint.path} declares {declared}; the tensors are laid out as "
            f"{layout.convention}: {next(iter(layout.tensors.values()))}"
        )
    return config


# Models whose experts have the width ``intermediate_size``; in others it is that of dense layers.
_EXPERT_INTERMEDIATE_SIZE = ("gpt_oss", "mixtral", "phimoe", "llama4_text")


def check_sizes(
    checkpoint: Checkpoint, layout: Layout, config: dict[str, Any], hidden: int, intermediate: int
) -> None:
    """Checks the sizes that ``config.json`` gives against those of the tensors.

    Raises:
      CheckpointError: they differ.
    """
    text = config.get("text_config")
    # A model of text and more may give its other part's sizes outside ``text_config``.
    section = text if isinstance(text, dict) else config
    expected = {"moe_intermediate_size": intermediate}
    if section.get("moe_latent_size") is None:  # else experts work on a narrower input
        expected["hidden_size"] = hidden
    if section.get("model_type", config.get("model_type")) in _EXPERT_INTERMEDIATE_SIZE:
        expected["intermediate_size"] = intermediate
    for key, size in expected.items():
        said = section.get(key)
        if isinstance(said, int) and said != size:
            what = "hidden" if key == "hidden_size" else "intermediate"
            raise CheckpointError(
                f"{layout.prefix} has {what} {size}, from {next(iter(layout.tensors.values()))}; "
                f"config.json of {checkpoint.path} says {key} {said}"
            )


def _declared(checkpoint: Checkpoint, config: dict[str, Any]) -> Convention | None:
    """Returns the convention that a configuration declares, ``None`` where it leaves it open."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise CheckpointError(
            f"config.json of {checkpoint.path} has a quantization_config that is no JSON object: "
            f"{quantization!r}"
        )
    method = quantization.get("quant_method")
    algorithm, format = quantization.get("quant_algo"), quantization.get("format")
    if method == "mxfp4":
        return "mxfp4"
    if method == "compressed-tensors":
        if format == "mixed-precision":
            return None
        num_bits = _num_bits(quantization)
        if format == "nvfp4-pack-quantized" and num_bits == 4:
            return "compressed-tensors"
        problem = f"format {format!r}, weights of num_bits {num_bits}"
    elif method in ("modelopt", "modelopt_fp4", None):
        group = quantization.get("group_size")
        if algorithm in (None, "MIXED_PRECISION"):
            return None
        if "NVFP4" in str(algorithm) and group in (None, 16):
            return "modelopt"
        problem = f"quant_algo {algorithm!r}, group_size {group}"
    else:
        problem = f"quant_method {method!r}"
    raise CheckpointError(
        f"config.json of {checkpoint.path} declares {problem}; load_experts reads modelopt NVFP4 "
        "(group_size 16), compressed-tensors nvfp4-pack-quantized, and mxfp4"
    )
