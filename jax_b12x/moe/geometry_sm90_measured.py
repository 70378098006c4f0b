"""Launch geometry that was measured to be the fastest on an H200, by shape; rules serve the rest.

``geometry_cuda.py`` looks here first. A line is made by ``tools/tune_moe_cuda.py``, which times the
candidates in captured chains of layers.
"""

from __future__ import annotations

# (hidden, intermediate, num_experts, top_k, num_tokens, quantized activations):
# (stages, fc1_split, fc2_split, fc2_order)
MEASURED: dict[tuple[int, int, int, int, int, bool], tuple[int, int, int, int]] = {}
