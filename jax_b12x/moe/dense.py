"""The dense expert that every token goes through (a shared expert), as one FFI call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_b12x import _native
from jax_b12x.arguments import check_array, dtype_name
from jax_b12x.moe.planner import DTYPES
from jax_b12x.moe.recipe import SILU, Activation
from jax_b12x.moe.token_call import absent_as_scalar, token_call

TARGET = "b12x_dense_mlp"

_BLOCK = 16
# Tokens that one launch takes, on every platform; more of them follow one another.
_MAX_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseExpert:
    """The weights of one expert in bfloat16, float16 or float32, as a pytree.

    Attributes:
      w13: ``[2 * intermediate, hidden]``; gate rows first, then up rows.
      w2: ``[hidden, intermediate]``, of the same dtype.
      w13_bias: ``float32[2 * intermediate]``, or None.
      w2_bias: ``float32[hidden]``, or None.
      shared_gate: ``[hidden]``, of the same dtype as ``w13``, or None. With it, a token's output is
        multiplied with ``sigmoid(x @ shared_gate)`` (Qwen2-MoE).
    """

    w13: jax.Array
    w2: jax.Array
    w13_bias: jax.Array | None = None
    w2_bias: jax.Array | None = None
    shared_gate: jax.Array | None = None

    @property
    def hidden(self) -> int:
        """Columns of ``w13``, rows of ``w2``."""
        return int(self.w13.shape[1])

    @property
    def intermediate(self) -> int:
        """Columns of ``w2``."""
        return int(self.w2.shape[1])

    def astype(self, dtype: DTypeLike) -> DenseExpert:
        """Returns these weights in another dtype, that of the ``x`` that they will meet.

        Biases stay in float32.

        Args:
          dtype: bfloat16, float16 or float32.

        Raises:
          TypeError: it is no dtype.
        """
        dtype, gate = dtype_name("dtype", dtype), self.shared_gate
        return dataclasses.replace(
            self,
            w13=self.w13.astype(dtype),
            w2=self.w2.astype(dtype),
            shared_gate=None if gate is None else gate.astype(dtype),
        )


def dense_mlp(x: jax.Array, expert: DenseExpert, *, activation: Activation = SILU) -> jax.Array:
    """Runs every token through one dense gated MLP.

    ::

        g,u = x @ w13.T (+ w13_bias)            # products accumulated in fp32
        h   = activation(g, u)                  # rounded to x.dtype
        y   = h @ w2.T (+ w2_bias)              # fp32
        out = y * sigmoid(x @ shared_gate)      # fp32, then rounded to x.dtype

    It is made for decode, where reading the weights is what takes the time: on an NVIDIA GPU more
    than 64 tokens run 64 at a time and read the weights as often; a matrix product of XLA is faster
    there. It works under ``jit``, inside ``shard_map``, and under ``vmap`` over tokens. It has no
    derivative: differentiate :func:`jax_b12x.moe.reference.dense_mlp`.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``; float32 on the CPU only. A token with a NaN gives NaN
        in its own row only.
      expert: the weights, of the dtype of ``x``; ``hidden`` and ``intermediate`` are multiples of
        16.
      activation: between the two products.

    Returns:
      ``x.dtype[num_tokens, hidden]``.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong shape.
      NativeError: the extension is not built.
    """
    check(x, expert, activation)
    if x.shape[0] == 0:
        return jnp.zeros_like(x)
    out: jax.Array = _call(activation)(x, expert)
    return out


@functools.lru_cache(maxsize=64)
def _call(activation: Activation) -> Any:
    return token_call(
        "dense_mlp",
        "differentiate jax_b12x.moe.reference.dense_mlp",
        functools.partial(_run, activation),
    )


def scratch_bytes(num_tokens: int, hidden: int, intermediate: int) -> int:
    """Returns the scratch that a call needs, in bytes."""
    return 4 * min(num_tokens, _MAX_TOKENS) * (hidden + intermediate + 1)


def _run(activation: Activation, x: jax.Array, expert: DenseExpert) -> jax.Array:
    _native.ensure_registered()
    scratch = scratch_bytes(x.shape[0], expert.hidden, expert.intermediate)
    results = (jax.typeof(x), jax.core.ShapedArray((scratch,), jnp.uint8))
    out, _ = jax.ffi.ffi_call(TARGET, results)(
        x,
        expert.w13,
        expert.w2,
        *map(absent_as_scalar, (expert.w13_bias, expert.w2_bias, expert.shared_gate)),
        activation=activation.kind,
        alpha=np.float32(activation.alpha),
        limit=np.float32(activation.limit),
    )
    return out


def check(x: jax.Array, expert: DenseExpert, activation: Activation) -> None:
    """Checks the arguments of :func:`dense_mlp`; raises as it says."""
    if not isinstance(expert, DenseExpert):
        raise TypeError(f"expert is a {type(expert).__name__}; it must be a DenseExpert")
    if not isinstance(activation, Activation):
        raise TypeError(
            f"activation is {activation!r}; it must be an Activation, such as moe.SILU or "
            "moe.SWIGLU_OAI"
        )
    for name, array in (("x", x), ("expert.w2", expert.w2)):
        _check_matrix(name, array)
    if x.dtype.name not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype.name}; it must be {' or '.join(DTYPES)}")
    if x.dtype == jnp.float32 and jax.default_backend() != "cpu":
        raise TypeError(
            "x has dtype float32, which dense_mlp takes on the CPU only; convert x and the weights "
            "to bfloat16 or float16, or call jax_b12x.moe.reference.dense_mlp"
        )
    hidden, intermediate = x.shape[1], expert.w2.shape[1]
    for name, value in (("hidden", hidden), ("intermediate", intermediate)):
        if value < _BLOCK or value % _BLOCK:
            raise ValueError(f"{name} is {value}; it must be a positive multiple of {_BLOCK}")
    check_expert(expert, hidden, intermediate, x.dtype)


def check_expert(
    expert: DenseExpert, hidden: int, intermediate: int, dtype: DTypeLike | None = None
) -> None:
    """Checks that an expert's arrays are of these sizes.

    Args:
      expert: the expert.
      hidden: columns of ``x``.
      intermediate: between the two products.
      dtype: of ``x``, which weights share; that of ``w2`` if not given.

    Raises:
      TypeError: an array has another dtype, or is none.
      ValueError: one has another shape.
    """
    for name, array in (("expert.w13", expert.w13), ("expert.w2", expert.w2)):
        _check_matrix(name, array)
    weights, whose = jnp.dtype(dtype or expert.w2.dtype), "the dtype of x"
    if dtype is None:
        whose = f"one of {', '.join(DTYPES)}, the same for all weights"
        if weights.name not in DTYPES:
            raise TypeError(f"expert.w2 has dtype {weights.name}; it must be {whose}")
    f32 = jnp.dtype(jnp.float32)
    arrays: tuple[tuple[str, jax.Array | None, Any, tuple[int, ...]], ...] = (
        ("w13", expert.w13, weights, (2 * intermediate, hidden)),
        ("w2", expert.w2, weights, (hidden, intermediate)),
        ("w13_bias", expert.w13_bias, f32, (2 * intermediate,)),
        ("w2_bias", expert.w2_bias, f32, (hidden,)),
        ("shared_gate", expert.shared_gate, weights, (hidden,)),
    )
    for name, given, wanted, shape in arrays:
        if given is None:
            continue
        check_array(f"expert.{name}", given)
        if given.dtype != wanted:
            why = "" if name.endswith("_bias") else f", {whose}"
            raise TypeError(
                f"expert.{name} has dtype {given.dtype.name}; it must be {wanted.name}{why}"
            )
        if given.shape != shape:
            raise ValueError(f"expert.{name} has shape {given.shape}; it must be {shape}")


def _check_matrix(name: str, array: Any) -> None:
    check_array(name, array)
    if len(array.shape) != 2:
        raise ValueError(f"{name} has shape {array.shape}; it must have two axes")
