"""The parameters of an MoE layer as one pytree: router, routed experts, shared expert."""

from __future__ import annotations

import dataclasses

import jax

from jax_b12x.moe import joined
from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.joined import JoinedExpert
from jax_b12x.moe.weights import ExpertWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """What an MoE layer computes with.

    Attributes:
      router: ``f32|bf16|f16[num_experts, hidden]``: one row of logits' weights an expert.
      experts: the routed experts, and behind them a shared one that is joined to them.
      shared: the expert that sees every token: :class:`~jax_b12x.moe.DenseExpert`, or packed
        :class:`~jax_b12x.moe.ExpertWeights` of one expert, or ``None``; a
        :class:`~jax_b12x.moe.JoinedExpert` where ``MoELayer.prepare`` joined it to ``experts``.
      router_bias: ``f32[num_experts]`` or ``None``: added to the logits of a softmax router
        (GPT-OSS); the correction bias of a sigmoid router, which takes part in choosing only.
      parts: how many devices experts and columns are split over: ``MoELayer.prepare`` sets it.
    """

    router: jax.Array
    experts: ExpertWeights
    shared: DenseExpert | ExpertWeights | JoinedExpert | None = None
    router_bias: jax.Array | None = None
    parts: tuple[int, int] = dataclasses.field(default=(1, 1), metadata={"static": True})

    @property
    def joined(self) -> int:
        """As how many of ``experts`` the shared one is among them, the last ones; 0: it is not."""
        return self.shared.num_experts if isinstance(self.shared, JoinedExpert) else 0

    def unprepare(self) -> LayerParams:
        """Returns these parameters as they were loaded, bit for bit.

        Packed experts come in the ``checkpoint`` layout, and a joined shared expert apart.

        Raises:
          ValueError: they are split over devices.
        """
        if self.parts != (1, 1):
            raise ValueError(
                f"params are split over {self.parts} devices (experts, columns), each with its "
                "part alone: load them again instead"
            )
        if isinstance(self.shared, JoinedExpert):
            experts, shared = joined.separate(self.experts, self.shared)
            return dataclasses.replace(self, experts=experts, shared=shared)
        apart = self.shared.unprepare() if isinstance(self.shared, ExpertWeights) else self.shared
        return dataclasses.replace(self, experts=self.experts.unprepare(), shared=apart)
