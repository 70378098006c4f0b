"""Launch geometry on NVIDIA GPUs; ``cuda/moe/params.h`` says what the kernels do with it."""

from __future__ import annotations

import dataclasses
import math

from jax_b12x.moe import layout_sm90
from jax_b12x.moe.geometry import Geometry, Request
from jax_b12x.moe.geometry_sm90_measured import MEASURED

# A resident grid needs every block on the GPU at once; below this many SMs one token's work does
# not fit a wave and the barrier buys nothing.
MIN_RESIDENT_SMS = 16
# More tokens than this go to the dynamic path: split launches of so many tokens, one after another.
MAX_DECODE_TOKENS = 64
# Whether a decode path that is forced for more tokens runs as several launches of so many.
SPLITS_DECODE = True
MAX_TOP_K = 16
MAX_EXPERTS = 1024

_MEASURED_SMS = 132
_MAX_JOINED = 4  # experts of a joined shared one that a measured geometry still serves
_WARPS = 16  # that multiply
_SHARED_BYTES = 227 << 10  # of one block, on the only architecture that there are kernels for
_STAGE_BYTES = _WARPS * layout_sm90.TILE_BYTES + 128  # a tile for every warp, and barriers
_REDUCE_STAGES = 8
_REDUCE_BYTES = _WARPS * 512 + 2 * _WARPS * 16  # sums of every warp, and barriers
_TOKEN_GROUP = 8  # tokens that one pass over a weight tile serves
_SHARED_INPUT_TOKENS = 1  # nvfp4: up to so many, every block quantizes x for itself
_OWNER, _EXPERT = 0, 1  # Fc2Order

# A warp's work besides its tiles, in tiles: handing on its sums and turning to the next unit.
_UNIT_OVERHEAD = 0.35
# Chunks of activations that a warp keeps in registers, and what a tile costs when there are more.
_HELD_CHUNKS, _UNHELD_COST = 3, 2.0
# Places in the ring of weights: more than 70 KB in flight bring nothing.
_STAGES = 4
_L1_BYTES = 16 << 10  # that stay


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One launch: at most 64 tokens."""

    num_tokens: int
    top_k: int
    num_experts: int
    quantized: bool
    fc1: tuple[int, int]  # row tiles, column tiles
    fc2: tuple[int, int]
    grid: int

    @property
    def items(self) -> int:
        """Experts that uniform routing would touch, with their groups of up to 8 tokens."""
        share = self.top_k / self.num_experts
        touched = self.num_experts * (1 - (1 - share) ** self.num_tokens)
        groups = self.num_tokens * self.top_k / _TOKEN_GROUP
        return max(1, round(max(touched, groups)))


def unsupported(request: Request, implementation: str) -> str | None:
    """Returns why ``implementation`` cannot run ``request``, or ``None`` if it can."""
    device = request.device
    if device.sm != 90:
        return f"there are kernels for sm_90 (Hopper) only, and the device is sm_{device.sm}"
    if request.dtype == "float32":
        return "kernels take bfloat16 and float16 activations; cast x to bfloat16"
    if request.dtype == "float16" and request.weight_format == "mxfp4":
        return "mxfp4 scales do not fit in float16; cast x to bfloat16"
    if request.top_k > MAX_TOP_K:
        return f"top_k is {request.top_k}; kernels take at most {MAX_TOP_K}"
    if request.num_experts > MAX_EXPERTS:
        return f"num_experts is {request.num_experts}; kernels take at most {MAX_EXPERTS}"
    if implementation == "fused" and not device.cooperative_launch:
        return "the device has no cooperative launch, which a resident grid needs"
    if implementation == "fused" and device.sm_count < MIN_RESIDENT_SMS:
        return (
            f"the device has {device.sm_count} SMs; a resident grid needs at least "
            f"{MIN_RESIDENT_SMS}"
        )
    return None


def geometry(request: Request, implementation: str) -> Geometry:
    """Returns the launch parameters of ``implementation`` for ``request``.

    Fused and split get the same ones, and with them the same order of summation.
    """
    tokens = max(1, min(request.num_tokens, MAX_DECODE_TOKENS))
    problem = _Problem(
        num_tokens=tokens,
        top_k=request.top_k,
        num_experts=request.num_experts,
        quantized=request.recipe.quantized_activations,
        fc1=(2 * -(-request.intermediate // 16), layout_sm90.tiles(1, request.hidden)[1]),
        fc2=layout_sm90.tiles(request.hidden, request.intermediate),
        grid=request.device.sm_count,
    )
    measured = _measured(request, tokens)
    if measured is not None and problem.grid == _MEASURED_SMS:
        stages, fc1_split, fc2_split, order = measured
    else:
        order = _fc2_order(problem)
        fc1_split = _split(problem.fc1[1], _fc1_units(problem), 2 if problem.quantized else 1)
        fc2_split = _split(problem.fc2[1], _fc2_units(problem, order), 1)
        stages = _stages(problem, order)
    reasons: tuple[str, ...] = ()
    if implementation == "dynamic":
        reasons = (
            f"many tokens run as split launches of {MAX_DECODE_TOKENS} tokens, which read the "
            "touched experts once a launch: right, not yet fast",
        )
    elif order == _EXPERT:
        reasons = (
            "the second product goes expert by expert and its rows are summed in a last step, so "
            "that activations are read by few SMs",
        )
    return Geometry(
        parameters=(
            ("grid", problem.grid),
            ("stages", stages),
            ("fc1_split", fc1_split),
            ("fc2_split", fc2_split),
            ("fc2_order", order),
        ),
        scratch_bytes=_scratch_bytes(problem, order),
        weight_layout="sm90",
        reasons=reasons,
    )


def _measured(request: Request, num_tokens: int) -> tuple[int, int, int, int] | None:
    """Returns what was the fastest for a request.

    A shared expert that is joined to the routed ones makes a few more experts that every token goes
    to. They do not change what the others ask for, which goes for them as well.
    """
    for joined in range(_MAX_JOINED + 1):
        key = (
            request.hidden,
            request.intermediate,
            request.num_experts - joined,
            request.top_k - joined,
            num_tokens,
            request.recipe.quantized_activations,
        )
        if key in MEASURED:
            return MEASURED[key]
    return None


def _fc2_order(problem: _Problem) -> int:
    """A block owns output columns where few tokens make that cheap and the columns go round."""
    row_tiles = problem.fc2[0]
    share = row_tiles / (problem.grid * math.ceil(row_tiles / problem.grid))
    return _OWNER if problem.num_tokens <= 8 and share > 0.75 else _EXPERT


def _fc1_units(problem: _Problem) -> int:
    """Row tiles that the busiest block gets."""
    return math.ceil(problem.items * problem.fc1[0] / problem.grid)


def _fc2_units(problem: _Problem, order: int) -> int:
    row_tiles = problem.fc2[0]
    if order == _OWNER:
        return math.ceil(row_tiles / problem.grid) * problem.items
    return math.ceil(problem.items * row_tiles / problem.grid)


def _split(column_tiles: int, units: int, run: int) -> int:
    """Returns how many warps share a row tile: the number that leaves the busiest warp least."""

    def cost(split: int) -> float:
        teams = _WARPS // split
        rounds = math.ceil(math.ceil(units / run) / teams) * run
        chunks = math.ceil(column_tiles / split)
        tile = 1.0 if chunks <= _HELD_CHUNKS else _UNHELD_COST
        return rounds * (chunks * tile + _UNIT_OVERHEAD)

    return min(range(1, _WARPS + 1), key=cost)


def _stages(problem: _Problem, order: int) -> int:
    """Returns how many stages of weights are in flight: what fits, up to what hides the latency."""
    stages = _STAGES
    while stages > 1 and _shared_bytes(problem, order, stages) > _SHARED_BYTES - _L1_BYTES:
        stages -= 1
    return stages


def _scratch_bytes(problem: _Problem, order: int) -> int:
    rows = problem.num_tokens * problem.top_k
    h = rows * problem.fc2[1] * layout_sm90.COLUMNS * 2
    y = rows * problem.fc2[0] * layout_sm90.ROWS * 4 if order == _EXPERT else 0
    shared_input = not problem.quantized or problem.num_tokens <= _SHARED_INPUT_TOKENS
    x = 0 if shared_input else problem.num_tokens * problem.fc1[1] * layout_sm90.COLUMNS * 2
    return h + y + x


def _shared_bytes(problem: _Problem, order: int, stages: int) -> int:
    """``SharedLayoutOf`` of ``cuda/moe/params.h``."""
    pairs = problem.num_tokens * problem.top_k
    size = stages * _STAGE_BYTES + _REDUCE_STAGES * _REDUCE_BYTES
    if order == _OWNER:
        size += math.ceil(problem.fc2[0] / problem.grid) * pairs * 64
    if problem.quantized and problem.num_tokens <= _SHARED_INPUT_TOKENS:
        size += problem.num_tokens * (problem.fc1[1] * 256 + 64)
    size += pairs * (16 + 4 + 4 + 2 + 2)
    return _round_up(size, 16) + 128


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
