"""The shape of the example model."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every number that fixes the parameters and the meaning of the model.

    Attributes:
      vocab: tokens are bytes below this; the text is ASCII.
      hidden: the width of the residual stream.
      layers: decoder blocks.
      heads: query heads.
      kv_heads: key and value heads; each serves ``heads // kv_heads`` query heads.
      head_dim: the width of a head.
      num_experts: routed experts a layer.
      top_k: routed experts a token.
      intermediate: the width inside a routed expert.
      shared_intermediate: the width inside the shared expert.
      drafts: tokens that the multi-token-prediction head drafts.
      draft_intermediate: the width inside the multi-token-prediction head.
      context: the longest sequence, in tokens.
      rope_theta: the base of the rotary frequencies.
      norm_epsilon: added to the mean square in RMSNorm.
    """

    vocab: int = 128
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 24
    top_k: int = 4
    intermediate: int = 128
    shared_intermediate: int = 128
    drafts: int = 3
    draft_intermediate: int = 512
    context: int = 512
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6

    def to_json(self) -> dict[str, int | float]:
        """Returns the fields as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, int | float]) -> ModelConfig:
        """Reads what :meth:`to_json` wrote.

        Raises:
          ValueError: a field is missing or unknown.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if names != set(fields):
            raise ValueError(
                f"model config has the fields {sorted(fields)}; it must have exactly "
                f"{sorted(names)}"
            )
        return cls(**fields)  # type: ignore[arg-type]


TINY = ModelConfig(
    hidden=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    num_experts=4,
    top_k=2,
    intermediate=64,
    shared_intermediate=64,
    draft_intermediate=64,
    context=64,
)
