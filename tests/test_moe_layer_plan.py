"""What an MoE layer asks of its plan: every row of the capability table."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_b12x import capability, moe
from jax_b12x.bench import layer as bench_layer
from jax_b12x.bench.measurement import Report
from jax_b12x.capability import CPU
from jax_b12x.moe import layer_plan, overlap_measured, planner
from jax_b12x.moe.overlap_measured import OverlapTimes

H200 = capability.KNOWN["h200"]
NO_COOPERATIVE = dataclasses.replace(H200, cooperative_launch=False)
FEW_SMS = dataclasses.replace(H200, sm_count=8)
MANY = 512
RESULTS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "results"

DEVICES = {"cpu": CPU, "h200": H200, "no cooperative launch": NO_COOPERATIVE, "8 SMs": FEW_SMS}


@pytest.fixture(autouse=True)
def _nothing_forced(monkeypatch):
    monkeypatch.delenv("B12X_NVFP4_SPLIT_DECODE", raising=False)


def make_layer(**changes):
    fields = {
        "hidden": 4096,
        "intermediate": 1408,
        "num_experts": 128,
        "top_k": 8,
        "shared_intermediate": 1408,
    }
    return moe.MoELayer(**{**fields, **changes})


def measured_for(layer, *, split, joined=None, tokens=range(1, 9)):
    """A measured table that has this layer, with fused decode at 50 µs."""
    times = OverlapTimes(fused=50.0, split=split, date="2026-01-31", joined=joined)
    return {layer.local.overlap_case: dict.fromkeys(tokens, times)}


def decide(layer, num_tokens, device=H200, *, measured=None, **options):
    return layer_plan.decide(
        layer.local,
        num_tokens=num_tokens,
        dtype=jnp.bfloat16,
        device=device,
        overlap=layer.overlap,
        measured={} if measured is None else measured,
        **options,
    )


# How decode is launched, and how the shared expert's work is submitted:
# recipe, tokens, device, measured µs of split (fused is 50), environment, launch, submission
TABLE = [
    # Not measured: fused, and what fused decode tolerates.
    *[("nvfp4", n, "h200", None, None, "fused", "pre_resident") for n in (1, 4, 7)],
    *[("w4a16", n, "h200", None, None, "fused", "pre_resident") for n in (1, 4, 7)],
    *[
        (r, n, "h200", None, None, "fused", "serial")
        for r in ("nvfp4", "w4a16")
        for n in (8, 9, 64)
    ],
    # Measured, and split wins: 1 to 8 tokens of the recipe that quantizes activations.
    *[("nvfp4", n, "h200", 40.0, None, "split", "concurrent") for n in (1, 2, 7, 8)],
    *[("nvfp4", n, "h200", 40.0, None, "fused", "serial") for n in (9, 16, 64)],
    *[("w4a16", n, "h200", 40.0, None, "fused", "pre_resident") for n in (1, 7)],
    *[("w4a16", n, "h200", 40.0, None, "fused", "serial") for n in (8, 64)],
    # Measured, and split loses.
    *[("nvfp4", n, "h200", 60.0, None, "fused", "pre_resident") for n in (1, 7)],
    ("nvfp4", 8, "h200", 60.0, None, "fused", "serial"),
    # Measured, but on another device.
    ("nvfp4", 1, "cpu", 40.0, None, "fused", "pre_resident"),
    # No resident grid: split, whatever was measured.
    *[
        (recipe, n, device, us, None, "split", "concurrent")
        for recipe in ("nvfp4", "w4a16")
        for n in (1, 8, 64)
        for device in ("no cooperative launch", "8 SMs")
        for us in (None, 40.0, 60.0)
    ],
    # Many tokens.
    *[
        (recipe, MANY, device, us, environment, "dynamic", "serial")
        for recipe in ("nvfp4", "w4a16")
        for device in DEVICES
        for us in (None, 40.0)
        for environment in (None, "0", "1")
    ],
    # The environment overrides what was measured, for the recipe that it is for.
    *[("nvfp4", n, "h200", 40.0, "0", "fused", "pre_resident") for n in (1, 7)],
    ("nvfp4", 8, "h200", 40.0, "0", "fused", "serial"),
    *[
        ("nvfp4", n, "h200", us, "1", "split", "concurrent")
        for n in (1, 8, 64)
        for us in (None, 60)
    ],
    *[("w4a16", n, "h200", None, "1", "fused", "pre_resident") for n in (1, 7)],
    ("w4a16", 8, "h200", None, "1", "fused", "serial"),
    ("nvfp4", 1, "cpu", None, "1", "split", "concurrent"),
    ("nvfp4", 1, "no cooperative launch", None, "1", "split", "concurrent"),
]


@pytest.mark.parametrize(
    ("recipe", "tokens", "device", "split_us", "environment", "launch", "submitted"), TABLE
)
def test_capability_table(
    monkeypatch, recipe, tokens, device, split_us, environment, launch, submitted
):
    if environment is not None:
        monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", environment)
    layer = make_layer(recipe=recipe)
    measured = None if split_us is None else measured_for(layer, split=split_us, tokens=range(999))
    made = decide(layer, tokens, DEVICES[device], measured=measured)
    assert (made.routed.implementation, made.order) == (launch, submitted)


# A packed shared expert as wide as the routed ones: how decode is launched, and the order:
# recipe, tokens, device, measured µs of split and joined (fused is 50), environment, launch, order
JOINED_TABLE = [
    # Not measured, or measured to win: joined whatever the launch is, for any number of tokens.
    *[
        (recipe, n, device, times, None, launch, "joined")
        for recipe in ("nvfp4", "w4a16")
        for device, n, launch in (
            *(("h200", n, "fused") for n in (1, 7, 8, 64)),
            *(("cpu", n, "fused") for n in (1, 8)),
            *(("no cooperative launch", n, "split") for n in (1, 8)),
            *(("8 SMs", n, "split") for n in (1, 8)),
            *((device, MANY, "dynamic") for device in DEVICES),
        )
        for times in (None, (40.0, 39.0))
    ],
    # The environment says how the one launch is made.
    *[("nvfp4", n, "h200", None, "1", "split", "joined") for n in (1, 8)],
    *[("nvfp4", n, "h200", None, "0", "fused", "joined") for n in (1, 8)],
    *[("w4a16", n, "h200", None, "1", "fused", "joined") for n in (1, 8)],
    # Measured to lose: the other orders, by their own rules; and only where it was measured.
    *[("nvfp4", n, "h200", (40.0, 41.0), None, "split", "concurrent") for n in (1, 8)],
    *[("nvfp4", n, "h200", (60.0, 51.0), None, "fused", "pre_resident") for n in (1, 7)],
    ("nvfp4", 8, "h200", (60.0, 51.0), None, "fused", "serial"),
    *[("w4a16", n, "h200", (60.0, 51.0), None, "fused", "pre_resident") for n in (1, 7)],
    ("w4a16", 8, "h200", (60.0, 51.0), None, "fused", "serial"),
    *[(r, MANY, "h200", (40.0, 41.0), None, "dynamic", "serial") for r in ("nvfp4", "w4a16")],
    *[("nvfp4", n, "cpu", (40.0, 41.0), None, "fused", "joined") for n in (1, 8)],
]


@pytest.mark.parametrize(
    ("recipe", "tokens", "device", "measured_us", "environment", "launch", "order"), JOINED_TABLE
)
def test_capability_table_of_a_shared_expert_that_can_be_joined(
    monkeypatch, recipe, tokens, device, measured_us, environment, launch, order
):
    if environment is not None:
        monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", environment)
    layer = make_layer(recipe=recipe, shared_format="nvfp4")
    measured = None
    if measured_us is not None:
        split, joined = measured_us
        measured = measured_for(layer, split=split, joined=joined)
    made = decide(layer, tokens, DEVICES[device], measured=measured)
    assert (made.routed.implementation, made.order) == (launch, order)
    assert made.joined == (order == "joined")
    assert (made.routed.num_experts, made.routed.top_k) == (128 + made.joined, 8 + made.joined)
    if made.block is not None:
        assert made.block.streams == (order in ("concurrent", "pre_resident"))


def test_joining_goes_by_all_numbers_of_tokens_that_were_measured():
    layer = make_layer(shared_format="nvfp4")
    wins, loses = (OverlapTimes(50.0, 45.0, "2026-01-31", joined) for joined in (40.0, 48.0))
    for rows, order in (({1: wins, 8: loses}, "joined"), ({1: loses, 4: loses, 8: wins}, "split")):
        measured = {layer.local.overlap_case: rows}
        for tokens in (1, 8):
            made = decide(layer, tokens, measured=measured)
            assert made.joined == (order == "joined")


NOT_JOINED = [
    ({"shared_format": "dense"}, "it is dense, and the routed experts' launch reads packed ones"),
    (
        {"weight_format": "mxfp4", "recipe": "w4a16"},
        "it is packed as nvfp4, the routed experts as mxfp4",
    ),
    ({"shared_intermediate": 704}, "a device's 704 columns of it are no multiple of the 1408"),
    ({"shared_intermediate": 2112}, "a device's 2112 columns of it are no multiple of the 1408"),
    ({"top_k": 16}, "top_k is 16, with 1 more than the 16 of a launch"),
    (
        {"top_k": 13, "shared_intermediate": 4 * 1408},
        "top_k is 13, with 4 more than the 16 of a launch",
    ),
    ({"num_experts": 1024}, "num_experts is 1024, with 1 more than the 1024 of a launch"),
    (
        {"mesh": Mesh(np.array(jax.devices()[:2]), ("ep",)), "expert_axis": "ep"},
        "a device's 704 columns of it are no multiple of the 1408 of a routed expert",
    ),
]


@pytest.mark.parametrize(("changes", "why"), NOT_JOINED)
def test_a_shared_expert_that_cannot_be_joined_takes_the_other_orders_and_says_why(changes, why):
    layer = make_layer(**{"shared_format": "nvfp4", **changes})
    made = decide(layer, 4)
    assert made.order in ("pre_resident", "serial")
    assert made.joined == 0
    assert made.routed.num_experts == layer.local.num_experts
    assert f"    - the shared expert is not joined to the routed ones: {why}" in made_text(layer)
    with pytest.raises(ValueError, match="joined is True, but the shared expert cannot be: "):
        layer.plan(4, device=H200, joined=True)


def made_text(layer, **options):
    return layer.explain(4, device=H200, **options)


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({}, 1),
        ({"shared_intermediate": 2 * 1408}, 2),
        ({"axes": {"tp": 2}, "tensor_axis": "tp"}, 1),
        ({"axes": {"ep": 2}, "expert_axis": "ep", "shared_intermediate": 2 * 1408}, 1),
        ({"axes": {"ep": 2}, "expert_axis": "ep", "shared_intermediate": 4 * 1408}, 2),
        (
            {
                "axes": {"ep": 2, "tp": 2},
                "expert_axis": "ep",
                "tensor_axis": "tp",
                "shared_intermediate": 2 * 1408,
            },
            1,
        ),
    ],
)
def test_each_device_joins_its_part_where_that_is_a_multiple_of_its_routed_experts(
    changes, experts
):
    if "axes" in changes:
        axes = changes.pop("axes")
        devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
        changes["mesh"] = Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    layer = make_layer(shared_format="nvfp4", **changes)
    made = decide(layer, 4)
    assert (made.order, made.joined) == ("joined", experts)
    assert made.routed.num_experts == layer.local.num_experts + experts
    assert made.routed.top_k == layer.local.top_k + experts


def test_parameters_that_hold_the_shared_expert_apart_take_the_other_orders():
    layer = make_layer(shared_format="nvfp4")
    made = layer.plan(4, device=H200, joined=False)
    assert (made.joined, made.block.joined) == (0, 0)
    assert made.routed.num_experts == 128
    text = made_text(layer, joined=False)
    assert "not joined: the parameters hold the shared expert by itself" in text
    off = make_layer(shared_format="nvfp4", overlap="off")
    assert off.plan(4, device=H200).order == "serial"
    with pytest.raises(ValueError, match="joined is True, but overlap is 'off', which runs the sh"):
        off.plan(4, device=H200, joined=True)


def test_a_joined_layer_takes_the_geometry_that_was_measured_for_its_routed_experts():
    for shared in (1408, 2 * 1408):
        layer = make_layer(shared_format="nvfp4", shared_intermediate=shared)
        for tokens in (1, 8, 64):
            alone = dataclasses.replace(layer, shared_intermediate=0).plan(tokens, device=H200)
            assert layer.plan(tokens, device=H200).routed.geometry == alone.routed.geometry


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 64])
def test_without_a_shared_expert_decode_is_fused(recipe, tokens):
    layer = make_layer(recipe=recipe, shared_intermediate=0)
    made = decide(layer, tokens)
    assert (made.routed.implementation, made.order) == ("fused", "serial")
    made = decide(layer, tokens, NO_COOPERATIVE)
    assert (made.routed.implementation, made.order) == ("split", "serial")


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16"])
@pytest.mark.parametrize("tokens", [1, 8, MANY])
@pytest.mark.parametrize("device", DEVICES)
def test_overlap_off_runs_everything_in_a_row_and_prefers_fused(recipe, tokens, device):
    layer = make_layer(recipe=recipe, overlap="off")
    made = decide(layer, tokens, DEVICES[device], measured=measured_for(layer, split=1.0))
    assert made.order == "serial"
    plain = decide(make_layer(recipe=recipe), tokens, DEVICES[device])
    assert made.routed == plain.routed


@pytest.mark.parametrize("implementation", ["fused", "split", "dynamic"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 64])
def test_the_hybrid_of_nvfp4_and_nf3_has_its_row_and_tolerates_nothing(implementation, tokens):
    assert planner.overlap("nvfp4_nf3", implementation, tokens) == "none"
    assert "nvfp4_nf3" not in layer_plan.SPLIT_RECIPES


def custom(logits, token_mask):
    raise AssertionError("planning routes nothing")


@pytest.mark.parametrize(
    "changes",
    [
        {"router": custom},
        {"num_experts": 64, "top_k": 32},
        {"mesh": Mesh(np.array(jax.devices()[:2]), ("ep",)), "expert_axis": "ep"},
    ],
    ids=["custom router", "more routes than the router kernel takes", "experts split"],
)
def test_where_routes_are_made_outside_a_resident_grid_has_nothing_to_overlap(monkeypatch, changes):
    layer = make_layer(**changes)
    fused = layer.plan(4, device=CPU)
    assert (fused.routed.implementation, fused.order, fused.block.router) == (
        *("fused", "serial"),
        False,
    )
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", "1")
    split = layer.plan(4, device=CPU)
    assert (split.order, split.block.router) == ("concurrent", False)


def test_the_table_is_asked_for_one_devices_part():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    layer = make_layer(mesh=mesh, tensor_axis="tp")
    assert layer.local.overlap_case.intermediate == 704
    assert layer.local.overlap_case.shared_intermediate == 704
    of_the_whole = measured_for(make_layer(), split=1.0)
    assert decide(layer, 1, measured=of_the_whole).routed.implementation == "fused"
    own = measured_for(layer, split=1.0)
    assert decide(layer, 1, measured=own).routed.implementation == "split"


def test_a_number_of_tokens_that_was_not_measured_goes_by_the_next_larger_one():
    layer = make_layer()
    fast, slow = (OverlapTimes(50.0, split, "2026-01-31") for split in (40.0, 60.0))
    measured = {layer.local.overlap_case: {2: fast, 4: slow, 6: fast}}
    chosen = {n: decide(layer, n, measured=measured).routed.implementation for n in range(1, 9)}
    split, fused = "split", "fused"
    assert list(chosen.values()) == [split, split, fused, fused, split, split, fused, fused]


def test_the_measured_table_is_that_of_the_committed_benchmarks():
    committed = {}
    for path in RESULTS.glob("layer-*.json"):
        report = Report.from_json(path.read_text())
        assert "H200" in report.environment.devices[0]
        for case, rows in bench_layer.overlap_times(report).items():
            committed.setdefault(case, {}).update(rows)
    assert committed == overlap_measured.MEASURED


def test_what_was_measured_has_a_date_and_is_of_a_recipe_that_may_split():
    for case, rows in overlap_measured.MEASURED.items():
        packed = case.shared_format == "nvfp4"
        assert packed or case.recipe in layer_plan.SPLIT_RECIPES
        for tokens, times in rows.items():
            assert 1 <= tokens <= layer_plan.MAX_SPLIT_TOKENS
            assert len(times.date) == 10
            assert min(times.fused, times.split, times.joined or 1) > 0
            assert packed or times.joined is None


def test_an_environment_that_forces_what_cannot_run_raises(monkeypatch):
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", "0")
    with pytest.raises(ValueError, match="no cooperative launch"):
        decide(make_layer(), 1, NO_COOPERATIVE)


@pytest.mark.parametrize("num_tokens", [1, 8, 40])
def test_fused_and_split_give_the_same_bits(monkeypatch, num_tokens):
    rng = np.random.default_rng(3)
    layer = moe.MoELayer(hidden=64, intermediate=64, num_experts=4, top_k=2, shared_intermediate=32)
    draw = rng.standard_normal
    params = moe.LayerParams(
        jnp.asarray(draw((4, 64), np.float32)),
        moe.ExpertWeights.quantize(*(draw((4, 64, 64), np.float32) for _ in range(3))),
        moe.DenseExpert(
            jnp.asarray(draw((64, 64), np.float32)), jnp.asarray(draw((64, 32), np.float32))
        ),
    )
    x = jnp.asarray(draw((num_tokens, 64), np.float32))
    outs = []
    for value in "01":
        monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", value)
        outs.append(np.asarray(jax.jit(lambda x: layer(x, params))(x)))
    np.testing.assert_array_equal(*outs)


def test_explain_prints_the_choice_and_the_reason():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    layer = make_layer(mesh=mesh, tensor_axis="tp", shared_format="nvfp4")
    text = layer.explain(4, device=H200)
    assert text.startswith(
        """\
MoE layer of 128 experts of 4096 x 1408, softmax top-8
  split           columns over 'tp' (2)
  a device has    128 experts of 4096 x 704, shared 704
  routed experts  fused, overlap pre_resident
  shared expert   nvfp4, joined to the routed ones
  order           joined
  reduction       one, of 2 ranks, 32,768 bytes each
  because
    - the shared expert is joined to the routed ones, as 1 expert that every token goes to: one \
launch reads all (not measured for this)
MoE block, 4 tokens
  router          in the block
  shared expert   joined: the last of the routed experts
  order           joined
"""
    )
    assert "nvfp4 MoE, 4 tokens of bfloat16[4096], top-9 of 129 experts, intermediate 704" in text
    text = layer.explain(4, device=H200, joined=False)
    assert (
        """
  shared expert   nvfp4
  order           pre_resident
  reduction       one, of 2 ranks, 32,768 bytes each
  because
    - split decode beside the shared expert was not measured for this: not preferred
    - not joined: the parameters hold the shared expert by itself
MoE block, 4 tokens
  router          in the block
  shared expert   nvfp4 split, intermediate 704
  order           pre_resident
"""
        in text
    )
    assert "nvfp4 MoE, 4 tokens of bfloat16[4096], top-8 of 128 experts, intermediate 704" in text


def test_explain_says_why_the_shared_expert_is_joined_or_not():
    layer = make_layer(shared_format="nvfp4")
    won = decide(layer, 1, measured=measured_for(layer, split=40.0, joined=39.0, tokens=(1, 8)))
    assert won.reasons == (
        "the shared expert is joined to the routed ones, as 1 expert that every token goes to: "
        "78.0 µs over 1, 8 tokens, 80.0 apart (measured 2026-01-31)",
    )
    lost = decide(layer, 1, measured=measured_for(layer, split=40.0, joined=41.0, tokens=(1, 8)))
    assert lost.reasons[-1] == (
        "the shared expert is not joined to the routed ones, which is slower: 82.0 µs over 1, 8 "
        "tokens, 80.0 apart (measured 2026-01-31)"
    )
    many = layer.explain(MANY, device=H200)
    assert "  order           joined" in many
    assert "many tokens: the router is a matrix product of XLA" in many


def test_explain_says_why_split_decode_was_chosen_or_not(monkeypatch):
    layer = make_layer()
    won = decide(layer, 1, measured=measured_for(layer, split=40.0))
    assert won.reasons[0] == (
        "split decode is the faster with the shared expert: fused 50.0 µs, split 40.0 (measured "
        "with 1 token, 2026-01-31)"
    )
    assert "split, so that the layer's shared expert may run beside it" in won.routed.explain()
    assert "forced" not in won.routed.explain()
    lost = decide(layer, 1, measured=measured_for(layer, split=60.0))
    assert lost.reasons[0].startswith("fused decode is the faster with the shared expert: fused 50")
    alone = make_layer(shared_intermediate=0).explain(1, device=H200)
    assert "no shared expert: nothing to run beside the routed ones" in alone
    assert "  reduction       none" in alone
    off = make_layer(overlap="off").explain(1, device=H200)
    assert "overlap is off" in off
    assert "  order           serial" in off
    many = layer.explain(MANY, device=H200)
    assert "many tokens: router and dense expert are XLA's matrix products, in a row" in many
    assert "dynamic" in many
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", "1")
    assert "forced to be split (B12X_NVFP4_SPLIT_DECODE" in layer.explain(1, device=H200)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (256.0, "256.0; it must be an integer"),
        ("256", "'256'; it must be an integer"),
        (True, "True; it must be an integer"),
        (-1, "-1; it must be 0 or more"),
    ],
)
def test_the_width_of_a_shared_expert_is_checked_as_the_other_sizes(size, said):
    with pytest.raises(ValueError, match=f"shared_intermediate is {said}"):
        moe.MoELayer(hidden=64, intermediate=64, num_experts=4, top_k=2, shared_intermediate=size)
