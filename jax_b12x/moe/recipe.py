"""Recipes: the numeric contract of an MoE, and the activation between its two products."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_b12x.arguments import number

WeightFormat = Literal["nvfp4", "mxfp4"]
RecipeName = Literal["w4a16", "nvfp4"]
ActivationKind = Literal["silu", "swiglu_oai"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is multiplied, in which format, and what is rounded in between.

    With ``x: [num_tokens, hidden]`` and an expert's ``w13: [2 * intermediate, hidden]`` (gate rows,
    then up rows) and ``w2: [hidden, intermediate]``::

        a   = input(x)                              # w4a16: x;    nvfp4: quantized to NVFP4
        g,u = a @ dequantize(w13).T (+ bias)        # products exact, accumulated in fp32
        h   = intermediate(activation(g, u))        # w4a16: rounded to x.dtype;  nvfp4: to NVFP4
        y   = h @ dequantize(w2).T (+ bias)         # fp32
        out = sum_k topk_weights[k] * y[k]          # fp32, k in order, then rounded to x.dtype

    Attributes:
      name: ``"w4a16"`` or ``"nvfp4"``.
      weight_formats: the weight formats that it accepts.
      quantized_activations: whether activations are quantized on the fly (W4A4).
    """

    name: RecipeName
    weight_formats: tuple[WeightFormat, ...]
    quantized_activations: bool


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("w4a16", weight_formats=("nvfp4", "mxfp4"), quantized_activations=False),
        Recipe("nvfp4", weight_formats=("nvfp4",), quantized_activations=True),
    )
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """The gated activation between the two products, computed in fp32.

    ``silu``: ``silu(gate) * up``. ``swiglu_oai`` (GPT-OSS): with ``gate = min(gate, limit)`` and
    ``up = clip(up, -limit, limit)``, ``(up + 1) * gate * sigmoid(alpha * gate)``. A NaN stays NaN
    in both.

    Attributes:
      kind: which of the two.
      alpha: the sigmoid's slope; only ``swiglu_oai`` uses it.
      limit: the clamp; only ``swiglu_oai`` uses it.
    """

    kind: ActivationKind = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.kind not in ("silu", "swiglu_oai"):
            raise ValueError(f"activation kind is {self.kind!r}; it must be 'silu' or 'swiglu_oai'")
        for name in ("alpha", "limit"):
            number(f"activation {name}", getattr(self, name))
        if not self.limit > 0:
            raise ValueError(f"activation limit is {self.limit!r}; it must be greater than 0")


SILU = Activation("silu")
SWIGLU_OAI = Activation("swiglu_oai")


def get_recipe(name: str) -> Recipe:
    """Returns the recipe called ``name``.

    Raises:
      ValueError: there is none; the message lists those there are.
    """
    try:
        return RECIPES[name]
    except KeyError:
        raise ValueError(
            f"recipe is {name!r}; it must be one of {', '.join(map(repr, RECIPES))}"
        ) from None
