"""``moe_block``: router, routed experts and a shared expert as one FFI call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_b12x import _native, workspace
from jax_b12x.arguments import check_array, what
from jax_b12x.moe import checks, dense, op, routing
from jax_b12x.moe.block_plan import BlockPlan, DensePlan, with_num_tokens
from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.plan import MoePlan
from jax_b12x.moe.token_call import absent_as_scalar, token_call
from jax_b12x.moe.weights import ExpertWeights
from jax_b12x.workspace_call import Need, call

TARGET = "b12x_moe_block"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterParams:
    """A router inside a block, as a pytree; :func:`jax_b12x.moe.routing.route` says what it does.

    Attributes:
      weight: ``f32|bf16|f16[num_experts, hidden]``.
      bias: ``float32[num_experts]``, or ``None``.
      scoring: ``"softmax"`` or ``"sigmoid"``.
      renormalize: whether a token's weights are divided by their sum.
      scale: what the weights are multiplied with in the end.
      num_groups: groups of experts; only with ``sigmoid``.
      topk_groups: groups that a token may use; only with ``sigmoid``.
    """

    weight: jax.Array
    bias: jax.Array | None = None
    scoring: routing.Scoring = dataclasses.field(default="softmax", metadata={"static": True})
    renormalize: bool = dataclasses.field(default=True, metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    num_groups: int = dataclasses.field(default=1, metadata={"static": True})
    topk_groups: int = dataclasses.field(default=1, metadata={"static": True})


class BlockResult(NamedTuple):
    """What a block gives.

    Attributes:
      out: ``x.dtype[num_tokens, hidden]``.
      topk_ids: ``int32[num_tokens, top_k]``, as the router chose or the caller gave them; ``top_k``
        is that of the routed plan, with the routes to a joined shared expert.
      topk_weights: ``float32[num_tokens, top_k]``.
    """

    out: jax.Array
    topk_ids: jax.Array
    topk_weights: jax.Array


def moe_block(
    x: jax.Array,
    routed: ExpertWeights,
    *,
    router: RouterParams | None = None,
    topk: tuple[jax.Array, jax.Array] | None = None,
    shared: DenseExpert | ExpertWeights | None = None,
    shared_gate: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    plan: BlockPlan,
) -> BlockResult:
    """Runs a router, the routed experts and a shared expert, overlapped as the plan says.

    ``out = routed + shared``, in fp32 and rounded once to ``x.dtype``, where ``routed`` is what
    :func:`fused_moe` gives and ``shared`` what :func:`dense_mlp` (or :func:`fused_moe` of one
    expert) gives: each order of the plan gives the same bits as the ops alone. A shared expert that
    is joined to the routed ones is summed with them in fp32, and rounded once with them.

    Fork and join are inside the one call. The auxiliary stream belongs to the call site's
    workspace (:mod:`jax_b12x.workspace`), and so do the words of grid barriers.

    It works under ``jit``, inside ``shard_map``, and under ``vmap`` over tokens. It has no
    derivative.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``; float32 on the CPU only.
      routed: the routed experts, in the layout that the plan names.
      router: the router; exactly one of ``router`` and ``topk`` is given.
      topk: ``topk_ids: int32[num_tokens, top_k]`` and ``topk_weights: float32[num_tokens, top_k]``,
        with the routes to a joined shared expert.
      shared: the shared expert: a :class:`DenseExpert` of the dtype of ``x``, packed
        :class:`ExpertWeights` of one expert, or ``None``, as the plan says.
      shared_gate: ``[hidden]``; with it a packed shared expert's output is multiplied with
        ``sigmoid(x @ shared_gate)``. A dense one brings its own.
      token_mask: ``bool[num_tokens]``; the router makes padding of tokens where it is false.
      plan: from :func:`plan_block`.

    Returns:
      The sum and the routes.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong shape or contradicts the plan.
      NativeError: the extension is not built.
    """
    if not isinstance(plan, BlockPlan):
        raise TypeError(f"plan is {plan!r}; it must be a BlockPlan, from jax_b12x.moe.plan_block")
    _check(x, routed, router, topk, shared, shared_gate, token_mask, plan)
    if plan.routed.num_tokens == 0:
        top_k = plan.routed.top_k
        nothing = jnp.zeros((0, top_k), jnp.int32), jnp.zeros((0, top_k), jnp.float32)
        return BlockResult(jnp.zeros_like(x), *(topk or nothing))
    shared_routes = None
    if isinstance(shared, ExpertWeights):
        shared_routes = _shared_routes(x, shared_gate)
    tokens = (x, topk, shared_routes, token_mask)
    call_block = _block_call(plan, workspace.current())
    return BlockResult(*call_block(tokens, (routed, router, shared)))


@contextlib.contextmanager
def record_launches() -> Iterator[list[dict[str, Any]]]:
    """Records what blocks submit, in order, from all threads: for tests and debugging.

    Yields:
      A list that is filled when the context is left, with a mapping for each call: ``op``;
      ``steps``, such as ``["fork", "shared on aux", "router", "join", "routed", "add"]``; and,
      where a CUDA graph was being captured, its ``nodes`` (kernels by name) and ``edges`` (pairs of
      places in ``nodes``) once the call was submitted. Contexts may be nested or overlap in other
      threads: each gets everything that was submitted while it was open.
    """
    records: list[dict[str, Any]] = []
    with _recorders_lock:
        _deliver_launches()
        _recorders.append(records)
        _switch_recording(on=True)
    try:
        yield records
    finally:
        with _recorders_lock:
            # Off before the last delivery: what a last call submits meanwhile is for nobody.
            if len(_recorders) == 1:
                _switch_recording(on=False)
            _deliver_launches()
            # By identity: lists with the same records are equal.
            _recorders[:] = [other for other in _recorders if other is not records]


# The lists of the open `record_launches` contexts; the extensions keep one record for all.
_recorders: list[list[dict[str, Any]]] = []
_recorders_lock = threading.Lock()


def _switch_recording(*, on: bool) -> None:
    for extension in (_native.host(), _native.cuda()):
        if extension:
            extension.record_launches(on=on)


def _deliver_launches() -> None:
    for extension in (_native.host(), _native.cuda()):
        if extension:
            launches = extension.take_launches()
            for records in _recorders:
                records += launches


def _shared_routes(x: jax.Array, gate: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the routes of the one expert that every token goes to."""
    ids = jnp.zeros((x.shape[0], 1), jnp.int32)
    if gate is None:
        return ids, jnp.ones((x.shape[0], 1), jnp.float32)
    logits = jnp.matmul(
        x.astype(jnp.float32),
        gate.astype(jnp.float32)[:, None],
        precision=jax.lax.Precision.HIGHEST,
    )
    return ids, jax.nn.sigmoid(logits)


@functools.lru_cache(maxsize=1024)
def _block_call(plan: BlockPlan, place: workspace.Place) -> Any:
    return token_call(
        "moe_block",
        "differentiate the sum of jax_b12x.moe.reference.moe and reference.dense_mlp",
        functools.partial(_run, plan, place),
    )


def _run(plan: BlockPlan, place: workspace.Place, tokens: Any, weights: Any) -> Any:
    x, topk, shared_routes, token_mask = tokens
    routed, router, shared = weights
    num_tokens, hidden = x.shape
    plan = with_num_tokens(plan, num_tokens)
    op.ensure_runnable(plan.routed)
    operands: list[jax.Array] = [x]
    results: list[tuple[tuple[int, ...], Any]] = [(x.shape, x.dtype)]
    attributes: dict[str, Any] = {
        "order": plan.order,
        "has_router": plan.router,
        "routed": op.attributes(plan.routed),
        "shared_kind": "none",
    }
    if plan.router:
        operands += [router.weight, absent_as_scalar(router.bias), absent_as_scalar(token_mask)]
        routes = (num_tokens, plan.routed.top_k)
        num_experts = router.weight.shape[0]
        scratch = routing._scratch_bytes(num_tokens, hidden, num_experts)
        results += [
            (routes, jnp.int32),
            (routes, jnp.float32),
            ((num_tokens, num_experts), jnp.float32),
            ((scratch,), jnp.uint8),
        ]
        attributes["router"] = {
            "scoring": router.scoring,
            "renormalize": router.renormalize,
            "scale": np.float32(router.scale),
            "num_groups": np.int64(router.num_groups),
            "topk_groups": np.int64(router.topk_groups),
            "num_joined": np.int64(plan.joined),
        }
    else:
        operands += topk
    operands += op.arrays(routed)
    results.append(((plan.routed.scratch_bytes,), jnp.uint8))
    if isinstance(plan.shared, MoePlan):
        operands += [*shared_routes, *op.arrays(shared)]
        attributes["shared_kind"] = "packed"
        attributes["shared"] = op.attributes(plan.shared)
        shared_scratch = plan.shared.scratch_bytes
    elif isinstance(plan.shared, DensePlan):
        absent = map(absent_as_scalar, (shared.w13_bias, shared.w2_bias, shared.shared_gate))
        operands += [shared.w13, shared.w2, *absent]
        activation = plan.shared.activation
        attributes["shared_kind"] = "dense"
        attributes["shared"] = {
            "activation": activation.kind,
            "alpha": np.float32(activation.alpha),
            "limit": np.float32(activation.limit),
        }
        shared_scratch = dense.scratch_bytes(num_tokens, hidden, plan.shared.intermediate)
    if plan.shared is not None:
        results += [(x.shape, x.dtype), (x.shape, x.dtype), ((shared_scratch,), jnp.uint8)]
    out, *rest = call(
        TARGET,
        results,
        operands,
        attributes,
        need=Need(bytes=plan.workspace_bytes, streams=plan.streams),
        place=place,
    )
    ids, route_weights = (rest[0], rest[1]) if plan.router else topk
    return out, ids, route_weights


def _check(
    x: jax.Array,
    routed: ExpertWeights,
    router: RouterParams | None,
    topk: tuple[jax.Array, jax.Array] | None,
    shared: DenseExpert | ExpertWeights | None,
    shared_gate: jax.Array | None,
    token_mask: jax.Array | None,
    plan: BlockPlan,
) -> None:
    check_array("x", x)
    if (router is None) == (topk is None):
        raise ValueError("exactly one of router and topk must be given")
    if (router is not None) != plan.router:
        raise ValueError(
            f"{'router' if router is not None else 'topk'} is given, but the plan was made for "
            f"{'a router in the block' if plan.router else 'routes that are given'}"
        )
    # The experts' checks look at routes; a router's come out as they must be.
    ids: Any = jax.ShapeDtypeStruct((x.shape[0], plan.routed.top_k), jnp.int32)
    route_weights: Any = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    if topk is not None:
        if not isinstance(topk, (tuple, list)) or len(topk) != 2:
            raise TypeError(f"topk is {what(topk)}; it must be (topk_ids, topk_weights)")
        ids, route_weights = topk
    checks.check_arrays(x, routed, ids, route_weights, weights_name="routed")
    checks.check_plan(plan.routed, x, routed, ids)
    if router is not None:
        _check_router(x, router, token_mask, plan)
    elif token_mask is not None:
        raise ValueError("token_mask is given without a router: give padding the id -1 in topk")
    _check_shared(x, shared, shared_gate, plan)


def _check_router(
    x: jax.Array, router: RouterParams, token_mask: jax.Array | None, plan: BlockPlan
) -> None:
    if not isinstance(router, RouterParams):
        raise TypeError(f"router is a {type(router).__name__}; it must be a RouterParams")
    options = routing._Options(
        plan.routed.top_k - plan.joined,
        router.scoring,
        router.renormalize,
        float(router.scale),
        router.num_groups,
        router.topk_groups,
        plan.joined,
    )
    routing._check_route(x, router.weight, router.bias, options, token_mask)
    experts = plan.routed.num_experts - plan.joined
    if router.weight.shape[0] != experts:
        raise ValueError(
            f"router.weight has {router.weight.shape[0]} rows; the plan has {experts} experts"
            + (f" and {plan.joined} joined" if plan.joined else "")
        )


def _check_shared(
    x: jax.Array,
    shared: DenseExpert | ExpertWeights | None,
    shared_gate: jax.Array | None,
    plan: BlockPlan,
) -> None:
    wanted = {MoePlan: ExpertWeights, DensePlan: DenseExpert, type(None): type(None)}
    expected = wanted[type(plan.shared)]
    if not isinstance(shared, expected):
        raise TypeError(
            f"shared is a {type(shared).__name__}; the plan was made for a {expected.__name__}"
        )
    if shared_gate is not None:
        if not isinstance(shared, ExpertWeights):
            raise ValueError(
                "shared_gate is for packed shared experts; a DenseExpert has a shared_gate of its "
                "own"
            )
        if shared_gate.shape != (x.shape[1],):
            raise ValueError(f"shared_gate has shape {shared_gate.shape}; it must be {x.shape[1:]}")
    if isinstance(plan.shared, MoePlan):
        assert isinstance(shared, ExpertWeights)
        ids: Any = jax.ShapeDtypeStruct((x.shape[0], 1), jnp.int32)
        weights: Any = jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)
        checks.check_arrays(x, shared, ids, weights)
        checks.check_plan(plan.shared, x, shared, ids)
    elif isinstance(plan.shared, DensePlan):
        assert isinstance(shared, DenseExpert)
        dense.check(x, shared, plan.shared.activation)
        if shared.intermediate != plan.shared.intermediate:
            raise ValueError(
                f"shared.intermediate is {shared.intermediate}, but the plan was made for "
                f"{plan.shared.intermediate}"
            )
