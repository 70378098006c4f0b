"""Launch geometry that was the fastest of those tried on an H200, by shape; rules serve the rest.

``geometry_cuda.py`` looks here first. Candidates were timed in chains of layers in CUDA graphs.
"""

from __future__ import annotations

# (hidden, intermediate, num_experts, top_k, num_tokens, quantized activations):
# (stages, fc1_split, fc2_split, fc2_order)
MEASURED: dict[tuple[int, int, int, int, int, bool], tuple[int, int, int, int]] = {
    (2048, 768, 128, 8, 1, False): (4, 16, 2, 0),
    (2048, 768, 128, 8, 1, True): (4, 16, 2, 0),
    (2048, 768, 128, 8, 8, False): (4, 8, 3, 1),
    (2048, 768, 128, 8, 8, True): (4, 8, 3, 1),
    (2048, 768, 128, 8, 64, False): (4, 8, 3, 1),
    (2048, 768, 128, 8, 64, True): (6, 8, 3, 1),
    (4096, 1408, 128, 8, 1, False): (4, 16, 6, 0),
    # With a joined expert, the kernel of a single token takes four warps a row tile at most.
    (4096, 1408, 129, 9, 1, False): (4, 16, 4, 0),
    (4096, 1408, 128, 8, 1, True): (4, 16, 4, 0),
    (4096, 1408, 128, 8, 8, False): (4, 16, 4, 1),
    (4096, 1408, 128, 8, 8, True): (4, 16, 4, 1),
    (4096, 1408, 128, 8, 64, False): (4, 16, 4, 1),
    (4096, 1408, 128, 8, 64, True): (4, 16, 4, 1),
    (6144, 256, 256, 8, 1, False): (4, 16, 2, 0),
    (6144, 256, 256, 8, 1, True): (4, 16, 2, 0),
}
