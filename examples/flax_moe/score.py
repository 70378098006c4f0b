"""Bits per byte: how well a model predicts a text."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.flax_moe import data
from examples.flax_moe.model import Decoder


def bits_per_byte(
    model: Decoder,
    text: np.ndarray,
    *,
    batch: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Returns the mean negative log2-likelihood of the bytes of ``text`` after its first.

    The text is seen through windows of the model's context that overlap by half, so that all but
    the first half window is predicted from at least half a context.

    Args:
      model: any decoder.
      text: ``uint8[n]``, at least 2 bytes.
      batch: windows a call.
      progress: called with the windows that are done and their number.
    """
    graph, state = nnx.split(model)
    context = model.config.context
    windows = data.windows(text, context, context // 2)
    num_windows = len(windows.tokens)
    batch = min(batch, num_windows)
    nats = 0.0
    for start in range(0, num_windows, batch):
        rows = slice(start, start + batch)
        missing = max(0, start + batch - num_windows)
        tokens, counted = (
            np.pad(a[rows], ((0, missing), (0, 0))) for a in (windows.tokens, windows.counted)
        )
        nats += float(_nats(graph, state, tokens, counted))
        if progress is not None:
            progress(min(start + batch, num_windows), num_windows)
    return nats / int(windows.counted.sum()) / math.log(2)


@functools.partial(jax.jit, static_argnames="graph")
def _nats(
    graph: nnx.GraphDef[Decoder], state: nnx.State, tokens: jax.Array, counted: jax.Array
) -> jax.Array:
    tokens = tokens.astype(jnp.int32)
    logits = nnx.merge(graph, state)(tokens[:, :-1]).logits
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(nll * counted)
