"""``MoELayer``: router, routed and shared experts, one reduction, on one device or a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jax_b12x import capability, comm
from jax_b12x.capability import DeviceCapability
from jax_b12x.comm import call
from jax_b12x.comm.all_reduce import check_norm
from jax_b12x.moe import (
    layer_checks,
    layer_explain,
    layer_place,
    layer_plan,
    layer_prepare,
    layer_routes,
    layer_shared,
    sharding,
)
from jax_b12x.moe.block import moe_block
from jax_b12x.moe.block_plan import OverlapChoice
from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.inference_only import guard
from jax_b12x.moe.joined import JoinedExpert
from jax_b12x.moe.layer_params import LayerParams
from jax_b12x.moe.layer_plan import LayerPlan, LocalShapes, SharedFormat
from jax_b12x.moe.op import fused_moe
from jax_b12x.moe.plan import Implementation, MoePlan
from jax_b12x.moe.recipe import SILU, Activation, RecipeName, WeightFormat

# From ``logits: f32[num_tokens, num_experts]`` and ``token_mask: bool[num_tokens]`` or ``None`` to
# ``topk_ids: int32[num_tokens, top_k]`` and ``topk_weights: f32[num_tokens, top_k]``.
CustomRouter = Callable[[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]]
Router = Literal["softmax", "sigmoid"] | CustomRouter

_ADVICE = "train with jax_b12x.flax.TrainableExperts"


@dataclasses.dataclass(frozen=True)
class MoELayer:
    """A mixture-of-experts layer: a value that says what to compute, called with parameters.

    ::

        layer = moe.MoELayer(
            hidden=4096, intermediate=1408, num_experts=128, top_k=8, shared_intermediate=1408,
            mesh=mesh, tensor_axis="tp")
        params = layer.prepare(moe.LayerParams(router, experts, shared))   # once, after loading
        with comm.ChannelPool(mesh, "tp") as pool:
            y = jax.jit(lambda x, p: layer(x, p, pool=pool))(x, params)

    On each device: ``out = routed experts + shared expert``, in one call for decode
    (:func:`~jax_b12x.moe.moe_block`); then one reduction over the devices. Outside ``shard_map``
    the layer maps itself over its mesh, and so it does inside one over other axes, such as those of
    data parallelism; inside one over its own axes it computes its device's part, with ``params``
    split as :meth:`param_specs` says. Without a mesh it runs on one device and reduces nothing. It
    is inference-only.

    Attributes:
      hidden: columns of ``x``.
      intermediate: of a routed expert, of the model.
      num_experts: routed experts of the model.
      top_k: routes a token.
      shared_intermediate: of the expert that sees every token; 0 where there is none.
      shared_format: ``"dense"`` (:class:`DenseExpert`) or ``"nvfp4"`` (packed, and computed in
        ``recipe``).
      recipe: the numeric contract of packed experts.
      weight_format: of the routed experts: ``"nvfp4"``, or with ``w4a16`` also ``"mxfp4"``.
      activation: between the two products, of routed and shared experts.
      router: ``"softmax"`` or ``"sigmoid"``, as in :func:`~jax_b12x.moe.routing.route`; or a
        function of ``logits: f32[num_tokens, num_experts]`` and the token mask or ``None``, which
        returns ``topk_ids`` and ``topk_weights``: weights of an id that is there twice add up, and
        an id of -1, or of no expert, contributes nothing.
      renormalize: whether a token's weights are divided by their sum. A router that is a function
        returns weights that are finished: this and the three below stay at their defaults.
      num_groups: groups of experts; of the sigmoid router.
      topk_groups: groups that a token may use; of the sigmoid router.
      routed_scaling_factor: what a token's weights are multiplied with in the end.
      mesh: the devices that the layer is split over.
      tensor_axis: the mesh axis that ``intermediate`` is split over.
      expert_axis: the mesh axis that experts are split over. The shared expert's intermediate is
        split over both.
      overlap: ``"auto"`` joins a packed shared expert to the routed ones where it is a multiple as
        wide as one of them, and lets another one overlap them as far as their plan allows;
        ``"off"`` runs them in a row.

    Raises:
      TypeError: the mesh or the name of an axis is of another type.
      ValueError: a field is out of range or contradicts another one.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    shared_intermediate: int = 0
    shared_format: SharedFormat = "dense"
    recipe: RecipeName = "nvfp4"
    weight_format: WeightFormat = "nvfp4"
    activation: Activation = SILU
    router: Router = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    mesh: Mesh | None = None
    tensor_axis: str | None = None
    expert_axis: str | None = None
    overlap: OverlapChoice = "auto"

    # What jax.jit(layer) is called in profiles and records; no field, since it has no type.
    __name__ = "moe_layer"

    def __post_init__(self) -> None:
        layer_checks.check_fields(self)
        # A NumPy scalar is as good as the number.
        object.__setattr__(self, "routed_scaling_factor", float(self.routed_scaling_factor))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the layer is split over: experts, then columns."""
        return tuple(axis for axis in (self.expert_axis, self.tensor_axis) if axis is not None)

    @property
    def expert_parts(self) -> int:
        """How many devices the experts are split over."""
        return self.parts(self.expert_axis)

    @property
    def tensor_parts(self) -> int:
        """How many devices ``intermediate`` is split over."""
        return self.parts(self.tensor_axis)

    @property
    def world_size(self) -> int:
        """How many devices the layer is split over."""
        return self.expert_parts * self.tensor_parts

    def parts(self, axis: str | None) -> int:
        """Returns how many devices a mesh axis has; 1 for ``None``."""
        return 1 if axis is None or self.mesh is None else int(self.mesh.shape[axis])

    @property
    def local(self) -> LocalShapes:
        """One device's part of the layer."""
        experts = sharding.experts_a_part(self.num_experts, self.expert_parts)
        return LocalShapes(
            recipe=self.recipe,
            weight_format=self.weight_format,
            hidden=self.hidden,
            intermediate=self.intermediate // self.tensor_parts,
            num_experts=experts,
            # Routes to one expert are joined, so that a device has no more of them than experts.
            top_k=min(self.top_k, experts),
            activation=self.activation,
            shared_format=self.shared_format if self.shared_intermediate else None,
            shared_intermediate=self.shared_intermediate // self.world_size,
        )

    def plan(
        self,
        num_tokens: int,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        device: DeviceCapability | None = None,
        implementation: Implementation | None = None,
        joined: bool | None = None,
    ) -> LayerPlan:
        """Returns how each device runs its part, for so many tokens; what a call asks as well.

        Args:
          num_tokens: rows of ``x``.
          dtype: of ``x``.
          device: what to plan for; a device of the mesh, or the default one, if not given.
          implementation: forces how routed experts are launched, as in :func:`jax_b12x.moe.plan`.
          joined: whether the parameters hold the shared expert among the routed ones
            (``bool(params.joined)``); what :meth:`prepare` does with parameters that allow it, if
            not given.

        Raises:
          ValueError: as for :func:`jax_b12x.moe.plan`; or the shared expert cannot be joined.
          ConfigError: an environment variable holds a bad value.
        """
        layer_checks.check_integer("num_tokens", num_tokens, 0)
        return layer_plan.decide(
            self.local,
            num_tokens=num_tokens,
            dtype=dtype,
            device=device or self._device(),
            overlap=self.overlap,
            implementation=implementation,
            router_in_block=self.expert_axis is None and layer_routes.fits_kernel(self),
            joined=joined,
        )

    def explain(
        self,
        num_tokens: int,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        device: DeviceCapability | None = None,
        joined: bool | None = None,
    ) -> str:
        """Returns what is chosen for so many tokens, and why, as text for people.

        Args: those of :meth:`plan`.
        """
        made = self.plan(num_tokens, dtype=dtype, device=device, joined=joined)
        return layer_explain.explain(self, made)

    def prepare(self, params: LayerParams, *, donate: bool = False) -> LayerParams:
        """Returns the parameters split over the mesh and in the layout that its devices read.

        Do it once, after loading. On a mesh each device gets its part alone: load a large model's
        parameters into host memory (``load_experts(..., device=jax.devices("cpu")[0])``).

        A packed shared expert is joined to the routed ones where that is what :meth:`plan` says:
        ``shared`` of the result is a :class:`JoinedExpert`. It stays apart where only one of the
        two has biases or, in recipes that quantize ``x``, where their ``w13_input_scale`` differ.
        :meth:`LayerParams.unprepare` gives back what was loaded.

        Parameters that were prepared for one device may be prepared again. Without a mesh it works
        under ``jax.jit``, where recipes that quantize ``x`` cannot compare input scales, so that a
        packed shared expert stays apart.

        Args:
          params: of the whole layer, experts in any layout.
          donate: free the packed arrays of ``params.experts`` as soon as they are copied, a matrix
            after the other; ``params`` can't be used afterwards. Arrays that the result has too,
            since nothing was to do about them, live on in it. Not on a mesh, whose devices take
            their parts in turn, and not under ``jax.jit``.

        Raises:
          TypeError: ``params`` or one of them is of another type, or traced where that cannot be.
          ValueError: the parameters are not those of this layer, or split over devices already; or
            ``donate`` on a mesh.
        """
        return layer_prepare.prepare(self, params, donate)

    def param_specs(self, params: LayerParams) -> LayerParams:
        """Returns the ``PartitionSpec`` of each array of prepared parameters, as ``in_specs``.

        Raises:
          TypeError: ``params`` is of another type.
        """
        layer_checks.check_container(params)
        replicated: Any = PartitionSpec()
        shared: Any = params.shared
        if isinstance(shared, DenseExpert):
            shared = sharding.dense_spec(shared, self.axes)
        elif isinstance(shared, JoinedExpert):
            shared = dataclasses.replace(shared, w13_input_scale=replicated)
        elif shared is not None:
            shared = sharding.experts_spec(shared, self.axes)
        return dataclasses.replace(
            params,
            router=replicated,
            experts=sharding.experts_spec(params.experts, self.axes),
            shared=shared,
            router_bias=None if params.router_bias is None else replicated,
        )

    def __call__(
        self,
        x: jax.Array,
        params: LayerParams,
        *,
        pool: comm.ChannelPool | None = None,
        token_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the layer's output, the same on every device.

        Args:
          x: ``f32|bf16|f16[num_tokens, hidden]``, the same on every device; on a mesh of Explicit
            axes it has to be sharded like that, on one of Auto axes it is brought there. Inside a
            ``shard_map`` over the layer's axes it must not vary over them, which is an error where
            JAX keeps track (``check_vma``) and gives wrong results where it does not.
          params: from :meth:`prepare`.
          pool: the channels of the layer's axes; needed where it has any.
          token_mask: ``bool[num_tokens]``; tokens where it is false are padding: they have no
            routes, and only the shared expert's output.

        Returns:
          ``x.dtype[num_tokens, hidden]``.

        Raises:
          TypeError: an argument has the wrong type or dtype.
          ValueError: an argument has the wrong shape, or parameters or pool are not the layer's.
          NotImplementedError: the call is differentiated.
        """
        out: jax.Array = self._map(x, params, pool, token_mask, None)
        return out

    def add_norm(
        self,
        x: jax.Array,
        params: LayerParams,
        residual: jax.Array,
        norm_weight: jax.Array,
        eps: float,
        *,
        pool: comm.ChannelPool | None = None,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what the next sublayer starts from: the layer's output joins the residual stream.

        ``new_residual = residual + layer(x)`` and ``normed = rms_norm(new_residual) *
        norm_weight``, in the launch of the reduction (:func:`jax_b12x.comm.all_reduce_rms_norm`).

        Args:
          x: as for :meth:`__call__`.
          params: as for :meth:`__call__`.
          residual: like ``x``, the same on every device.
          norm_weight: ``[hidden]``, of ``x.dtype``.
          eps: added to the mean of squares: 0 or more, known when the program is traced.
          pool: as for :meth:`__call__`.
          token_mask: as for :meth:`__call__`.

        Returns:
          ``(normed, new_residual)``, both like ``x``.

        Raises: what :meth:`__call__` raises.
        """
        norm = (residual, norm_weight, eps)
        normed, new_residual = self._map(x, params, pool, token_mask, norm)
        return normed, new_residual

    def _map(
        self,
        x: jax.Array,
        params: LayerParams,
        pool: comm.ChannelPool | None,
        token_mask: jax.Array | None,
        norm: tuple[jax.Array, jax.Array, float] | None,
    ) -> Any:
        """Runs the layer where it is, or over its mesh where it is outside of one."""
        layer_checks.check_call(self, x, params, pool, token_mask)
        residual, norm_weight, eps = None, None, 0.0
        if norm is not None:
            _, residual, norm_weight, eps = check_norm(x, *norm, weight_name="norm_weight")
        x, params, token_mask, residual, norm_weight = guard(
            "MoELayer", _ADVICE, (x, params, token_mask, residual, norm_weight)
        )
        if residual is not None and norm_weight is not None:
            norm = (residual, norm_weight, eps)
        axes = layer_place.axes_to_map(self)
        if not axes:
            same = {"x": x, "token_mask": token_mask, "residual": residual}
            layer_place.check_same_on_devices(self, {**same, "norm_weight": norm_weight})
            return self._run(x, params, pool, token_mask, norm)
        replicated = PartitionSpec()
        arguments = {
            "x": (x, replicated),
            "params": (params, self.param_specs(params)),
            "token_mask": (token_mask, replicated),
            "residual": (residual, replicated),
            "norm_weight": (norm_weight, replicated),
        }
        layer_place.check_shardings(arguments)

        def body(x: Any, params: Any, mask: Any, *norm: Any) -> Any:
            return self._run(x, params, pool, mask, None if norm[0] is None else (*norm, eps))

        arrays, specs = zip(*arguments.values(), strict=True)
        # Inside a shard_map over other axes the mesh in force is the layer's.
        mesh = None if jax.sharding.get_abstract_mesh().manual_axes else self.mesh
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=replicated, axis_names=axes
        )
        return mapped(*arrays)

    def _run(
        self,
        x: jax.Array,
        params: LayerParams,
        pool: comm.ChannelPool | None,
        token_mask: jax.Array | None,
        norm: tuple[jax.Array, jax.Array, float] | None,
    ) -> Any:
        if pool is not None:
            x = call.vary(x, pool)  # what is computed from it is a device's part
        partial = self.partial(x, params, token_mask=token_mask)
        if norm is not None:
            residual, weight, eps = norm
            if pool is None:
                return comm.add_rms_norm(partial, residual, weight, eps)
            return comm.all_reduce_rms_norm(partial, residual, weight, eps, pool)
        return partial if pool is None else comm.all_reduce(partial, pool)

    def partial(
        self,
        x: jax.Array,
        params: LayerParams,
        *,
        token_mask: jax.Array | None = None,
        plan: LayerPlan | None = None,
    ) -> jax.Array:
        """Returns one device's part of the sum, without the reduction.

        For code that reduces in its own way: inside ``shard_map`` where the layer has a mesh.

        Args:
          x: as for :meth:`__call__`; inside ``shard_map`` marked as varying over the layer's axes.
          params: as for :meth:`__call__`.
          token_mask: as for :meth:`__call__`.
          plan: how to run it, from :meth:`plan`; made from the arguments if not given.
            ``plan.joined`` must be ``params.joined``.

        Returns:
          ``x.dtype[num_tokens, hidden]``.

        Raises:
          TypeError: an argument has the wrong type or dtype.
          ValueError: an argument has the wrong shape, the parameters or the plan are not the
            layer's, or a mesh's axes are not those of a ``shard_map``.
          NotImplementedError: the call is differentiated.
        """
        layer_place.check_inside(self)
        layer_checks.check_tokens(self, x, token_mask)
        layer_checks.check_local(self, x, params)
        made = plan or self.plan(x.shape[0], dtype=x.dtype, joined=bool(params.joined))
        layer_checks.check_joined(made, params)
        x, params, token_mask = guard("MoELayer", _ADVICE, (x, params, token_mask))
        shared = None if isinstance(params.shared, JoinedExpert) else params.shared
        if made.block is None:
            ids, weights = layer_routes.routes(self, x, params, token_mask, decode=False)
            routed = fused_moe(x, params.experts, ids, weights, plan=made.routed)
            if shared is None:
                return routed
            if isinstance(shared, DenseExpert):
                added = layer_shared.dense(x, shared, self.activation)
            else:
                shared_plan = layer_plan.shared_plan(self.local, made.routed)
                assert isinstance(shared_plan, MoePlan)
                added = layer_shared.packed(x, shared, shared_plan)
            return (routed.astype(jnp.float32) + added).astype(x.dtype)
        block = functools.partial(moe_block, x, params.experts, shared=shared, plan=made.block)
        if made.block.router:
            router = layer_routes.in_block(self, params)
            return block(router=router, token_mask=token_mask).out
        return block(topk=layer_routes.routes(self, x, params, token_mask, decode=True)).out

    def _device(self) -> DeviceCapability:
        if self.mesh is None:
            return capability.current()
        return capability.detect(self.mesh.devices.flat[0])
