"""Launch plans: the frozen, hashable decision of how one MoE call runs, and why."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax.typing import DTypeLike

from jax_b12x import capability, config
from jax_b12x.arguments import dtype_name
from jax_b12x.capability import DeviceCapability, Platform
from jax_b12x.moe import planner
from jax_b12x.moe.recipe import SILU, Activation, RecipeName, WeightFormat, get_recipe
from jax_b12x.moe.weights import WeightLayout

Implementation = Literal["fused", "split", "dynamic", "reference"]
Overlap = Literal["concurrent", "pre_resident", "none"]


@dataclasses.dataclass(frozen=True)
class MoePlan:
    """How one MoE call with static shapes is launched.

    Attributes:
      recipe: the numeric contract.
      weight_format: the format of the weights that it reads.
      implementation: ``fused`` (one launch over a resident grid), ``split`` (two barrier-free
        launches), ``dynamic`` (sort by expert, grouped products) or ``reference`` (plain ``jnp``).
      device: the device that it is made for.
      num_tokens: rows of ``x``.
      hidden: columns of ``x``.
      intermediate: columns between the two products.
      num_experts: experts on this device.
      top_k: routes a token.
      dtype: the name of ``x``'s dtype.
      activation: the activation between the two products.
      weight_layout: the layout that the weights must have (``ExpertWeights.prepare`` makes it).
      overlap: what auxiliary-stream work may do beside it: ``concurrent``, ``pre_resident`` or
        ``none``.
      scratch_bytes: device scratch, passed as an extra result.
      workspace_bytes: what it keeps on the device from run to run, leased from a workspace pool:
        the words of the grid barrier of ``fused``.
      geometry: launch parameters by name, in a fixed order.
      reasons: why, a sentence each.
      host_isa: the instruction set of the CPU kernels, from ``B12X_HOST_ISA``; ``"auto"`` is
        decided where the program runs.
    """

    recipe: RecipeName
    weight_format: WeightFormat
    implementation: Implementation
    device: DeviceCapability
    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: str
    activation: Activation
    weight_layout: WeightLayout
    overlap: Overlap
    scratch_bytes: int
    workspace_bytes: int = 0
    geometry: tuple[tuple[str, int], ...] = ()
    reasons: tuple[str, ...] = ()
    host_isa: str = "auto"

    @property
    def platform(self) -> Platform:
        """``"cpu"`` or ``"cuda"``."""
        return self.device.platform

    def explain(self) -> str:
        """Returns what was chosen and why, as text for people."""
        parameters = ", ".join(f"{name}={value}" for name, value in self.geometry)
        lines = [
            f"{self.recipe} MoE, {self.num_tokens} token{'' if self.num_tokens == 1 else 's'} of "
            f"{self.dtype}[{self.hidden}], "
            f"top-{self.top_k} of {self.num_experts} experts, intermediate {self.intermediate}, "
            f"{self.weight_format} weights, {self.activation.kind}",
            f"  device          {self.device}",
            f"  implementation  {self.implementation}",
            f"  overlap         {self.overlap}",
            f"  weight layout   {self.weight_layout}",
            f"  scratch         {self.scratch_bytes:,} bytes",
            f"  workspace       {self.workspace_bytes:,} bytes",
            f"  geometry        {parameters or 'none'}",
            *([f"  instructions    {self._instructions()}"] if self.platform == "cpu" else []),
            "  because",
        ]
        return "\n".join([*lines, *(f"    - {reason}" for reason in self.reasons)])

    def _instructions(self) -> str:
        if self.host_isa == "auto":
            return "the widest that the processor has"
        return f"{self.host_isa} (B12X_HOST_ISA)"


def plan(
    recipe: str,
    *,
    num_tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    dtype: DTypeLike,
    activation: Activation = SILU,
    weight_format: WeightFormat | None = None,
    implementation: Implementation | None = None,
    device: DeviceCapability | None = None,
    split_decode: bool | None = None,
) -> MoePlan:
    """Decides how an MoE call of these static shapes runs.

    The same arguments give the same plan. What an argument leaves open is read from the process
    first (the default device, ``B12X_NVFP4_SPLIT_DECODE``, ``B12X_HOST_ISA``), and the decision
    itself is pure.

    Args:
      recipe: ``"w4a16"`` or ``"nvfp4"``.
      num_tokens: rows of ``x``, 0 or more.
      hidden: columns of ``x``, a multiple of the weight format's block.
      intermediate: columns between the two products, a multiple of the block.
      num_experts: experts on this device.
      top_k: routes a token, at most ``num_experts``.
      dtype: of ``x``: float32, bfloat16 or float16.
      activation: the activation between the two products.
      weight_format: ``"nvfp4"`` or ``"mxfp4"``; the recipe's first one if not given.
      implementation: forces a path; a path that cannot run raises, it is never replaced. ``fused``
        and ``split`` run more tokens than decode has as well, on CUDA 64 at a time.
      device: what to plan for; the process's default device if not given.
      split_decode: forces ``nvfp4`` decode to be split (true) or fused (false), as
        ``B12X_NVFP4_SPLIT_DECODE`` does, which is read if this is not given. Neither touches other
        recipes, a forced ``implementation``, or more tokens than decode has (64 on CUDA, 16 on a
        CPU), which take the dynamic path; ``explain()`` says so.

    Returns:
      The plan; ``explain()`` prints it.

    Raises:
      TypeError: ``dtype``, ``device`` or ``split_decode`` is of another type.
      ValueError: an argument is out of range, or the forced path cannot run; says why.
      ConfigError: an environment variable holds a bad value.
    """
    if device is not None and not isinstance(device, DeviceCapability):
        raise TypeError(
            f"device is {device!r}; it must be a jax_b12x.capability.DeviceCapability, or None for "
            "the default device"
        )
    if split_decode is None:
        split_decode = config.NVFP4_SPLIT_DECODE.get()
    elif not isinstance(split_decode, bool):
        raise TypeError(f"split_decode is {split_decode!r}; it must be True, False or None")
    request = planner.Request(
        recipe=get_recipe(recipe),
        weight_format=weight_format or get_recipe(recipe).weight_formats[0],
        num_tokens=num_tokens,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        dtype=dtype_name("dtype", dtype),
        activation=activation,
        device=device or capability.current(),
    )
    decision = planner.decide(request, implementation, split_decode)
    return MoePlan(
        recipe=request.recipe.name,
        weight_format=request.weight_format,
        implementation=decision.implementation,
        device=request.device,
        num_tokens=num_tokens,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        dtype=request.dtype,
        activation=activation,
        weight_layout=decision.geometry.weight_layout,
        overlap=planner.overlap(request.recipe.name, decision.implementation, num_tokens),
        scratch_bytes=decision.geometry.scratch_bytes,
        workspace_bytes=planner.workspace_bytes(decision.implementation),
        geometry=decision.geometry.parameters,
        reasons=decision.reasons,
        host_isa=config.HOST_ISA.get(),
    )
