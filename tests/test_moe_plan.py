"""Plans: which path is taken, what may run beside it, and what is refused."""

import dataclasses

import jax.numpy as jnp
import pytest

from jax_b12x import config
from jax_b12x.capability import CPU, DeviceCapability
from jax_b12x.moe import planner
from jax_b12x.moe.plan import plan
from jax_b12x.moe.recipe import SWIGLU_OAI

H200 = DeviceCapability("cuda", sm=90, sm_count=132, cooperative_launch=True, name="H200")
NO_COOPERATIVE = dataclasses.replace(H200, cooperative_launch=False)
FEW_SMS = dataclasses.replace(H200, sm_count=8)


@pytest.fixture(autouse=True)
def _no_forced_split(monkeypatch):
    monkeypatch.delenv("B12X_NVFP4_SPLIT_DECODE", raising=False)


def make(recipe="nvfp4", **changes):
    facts = {
        "num_tokens": 4,
        "hidden": 1024,
        "intermediate": 512,
        "num_experts": 64,
        "top_k": 4,
        "dtype": jnp.bfloat16,
        "device": CPU,
    }
    return plan(recipe, **{**facts, **changes})


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "h200"])
def test_same_facts_give_the_same_hashable_plan(device):
    first, second = make(device=device), make(device=device)
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, make(device=device, num_tokens=5)}) == 2


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 16])
def test_decode_is_fused_where_nothing_speaks_against_it(device, recipe, num_tokens):
    assert make(recipe, device=device, num_tokens=num_tokens).implementation == "fused"


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "h200"])
def test_many_tokens_take_the_dynamic_path(device):
    assert make(device=device, num_tokens=4096).implementation == "dynamic"


@pytest.mark.parametrize(
    ("device", "why"), [(NO_COOPERATIVE, "cooperative launch"), (FEW_SMS, "8 SMs")]
)
def test_decode_is_split_where_a_grid_cannot_be_resident(device, why):
    made = make("w4a16", device=device)
    assert made.implementation == "split"
    assert any(why in reason for reason in made.reasons)


OVERLAP = [
    # recipe, implementation, tokens, what may run beside it
    *[(recipe, "split", n, "concurrent") for recipe in ("nvfp4", "w4a16") for n in (1, 7, 8, 64)],
    *[(recipe, "fused", n, "pre_resident") for recipe in ("nvfp4", "w4a16") for n in (1, 4, 7)],
    *[(recipe, "fused", n, "none") for recipe in ("nvfp4", "w4a16") for n in (8, 9, 64)],
    *[(recipe, "dynamic", n, "none") for recipe in ("nvfp4", "w4a16") for n in (1, 7, 8, 512)],
]


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize(("recipe", "implementation", "num_tokens", "expected"), OVERLAP)
def test_overlap_capability(device, recipe, implementation, num_tokens, expected):
    made = make(recipe, device=device, implementation=implementation, num_tokens=num_tokens)
    assert made.overlap == expected
    assert f"overlap         {expected}" in made.explain()


@pytest.mark.parametrize("implementation", ["fused", "split", "dynamic"])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 64])
def test_the_nvfp4_nf3_hybrid_tolerates_no_overlap(implementation, num_tokens):
    assert planner.overlap("nvfp4_nf3", implementation, num_tokens) == "none"


@pytest.mark.parametrize(("value", "expected"), [("0", "fused"), ("1", "split"), ("", "fused")])
def test_environment_forces_how_nvfp4_decode_is_launched(monkeypatch, value, expected):
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", value)
    assert make("nvfp4", device=H200).implementation == expected


def test_environment_leaves_everything_but_nvfp4_decode_alone(monkeypatch):
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", "1")
    assert make("w4a16").implementation == "fused"
    assert make("nvfp4", num_tokens=4096).implementation == "dynamic"
    assert make("nvfp4", implementation="fused").implementation == "fused"


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("split_decode", [True, False])
def test_split_decode_that_has_no_say_is_said_to_have_none(device, split_decode):
    made = make(device=device, num_tokens=65, split_decode=split_decode)
    assert made.implementation == "dynamic"
    assert "split_decode, which is set, is about decode launches alone" in made.explain()
    assert "split_decode" not in make(device=device, num_tokens=65).explain()
    unconcerned = make("w4a16", device=device, num_tokens=65, split_decode=split_decode)
    assert "split_decode" not in unconcerned.explain()


@pytest.mark.parametrize("implementation", ["fused", "split"])
def test_a_decode_path_forced_for_many_tokens_says_how_it_runs(implementation):
    text = make(device=H200, num_tokens=65, implementation=implementation).explain()
    assert "65 tokens are more than the 64 that decode launches take, and dynamic is the" in text
    assert f": {implementation} launches of 64 tokens follow one another, and each reads" in text
    text = make(device=CPU, num_tokens=17, implementation=implementation).explain()
    assert "17 tokens are more than the 16 that decode launches take, and dynamic is the" in text
    assert "follow one another" not in text
    for device, most in ((H200, 64), (CPU, 16)):
        made = make(device=device, num_tokens=most, implementation=implementation)
        assert "more than" not in made.explain().replace("of more than 7 tokens", "")


def test_split_decode_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", "1")
    assert make("nvfp4", split_decode=False).implementation == "fused"


def test_bad_environment_value_is_refused_with_the_allowed_forms(monkeypatch):
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", "yes")
    with pytest.raises(config.ConfigError, match=r"B12X_NVFP4_SPLIT_DECODE='yes'.*0 \(fused\), 1"):
        make()


def test_forced_path_that_cannot_run_raises_and_says_why():
    with pytest.raises(
        ValueError, match=r"'fused' cannot run nvfp4.*no cooperative launch.*forced"
    ):
        make(device=NO_COOPERATIVE, implementation="fused")


def test_a_path_that_nobody_forced_is_not_blamed():
    with pytest.raises(ValueError, match=r"there is no kernel for w4a16 with 1 token on .*top_k"):
        make("w4a16", device=H200, num_tokens=1, top_k=17)


@pytest.mark.parametrize("changes", [{"device": "h200"}, {"split_decode": "yes"}])
def test_an_argument_of_another_type_is_named(changes):
    (name,) = changes
    with pytest.raises(TypeError, match=f"{name} is '.*must be"):
        make(**changes)


def test_environment_that_forces_an_impossible_path_raises_and_says_why(monkeypatch):
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", "0")
    with pytest.raises(ValueError, match="8 SMs"):
        make(device=FEW_SMS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "w8a8"}, "recipe is 'w8a8'; it must be one of 'w4a16', 'nvfp4'"),
        ({"weight_format": "mxfp4"}, "weight_format is 'mxfp4'; recipe 'nvfp4' takes 'nvfp4'"),
        ({"hidden": 1000}, "hidden is 1000; it must be a positive multiple of 16"),
        ({"intermediate": 0}, "intermediate is 0; it must be a positive multiple of 16"),
        (
            {"recipe": "w4a16", "weight_format": "mxfp4", "hidden": 48},
            "hidden is 48; it must be a positive multiple of 32, the block of mxfp4",
        ),
        ({"top_k": 65}, r"top_k is 65; it must be between 1 and num_experts \(64\)"),
        ({"top_k": 0}, "top_k is 0; it must be between 1"),
        ({"num_experts": 0}, "num_experts is 0; it must be 1 or more"),
        ({"num_tokens": -1}, "num_tokens is -1; it must be 0 or more"),
        ({"dtype": jnp.int32}, "dtype of x is int32; it must be float32, bfloat16, float16"),
        ({"implementation": "magic"}, "implementation is 'magic'; it must be one of 'fused'"),
    ],
)
def test_facts_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_explain_says_what_was_chosen_and_why():
    text = make("w4a16", weight_format="mxfp4", activation=SWIGLU_OAI, device=H200).explain()
    for part in ("w4a16", "mxfp4", "swiglu_oai", "fused", "H200 (sm_90, 132 SMs", "because"):
        assert part in text
    assert "decode in one launch" in text


def test_cpu_plan_says_which_instruction_set_is_forced(monkeypatch):
    assert "instructions    the widest that the processor has" in make().explain()
    monkeypatch.setenv("B12X_HOST_ISA", "baseline")
    assert "instructions    baseline (B12X_HOST_ISA)" in make().explain()
    assert make() != dataclasses.replace(make(), host_isa="auto")


def test_dynamic_scratch_stops_growing_with_the_number_of_tokens():
    assert make(num_tokens=1 << 20).scratch_bytes == make(num_tokens=1 << 14).scratch_bytes


@pytest.mark.parametrize(
    ("name", "value"), [("hidden", 1024.0), ("top_k", True), ("num_tokens", "4")]
)
def test_a_size_that_is_no_integer_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is .*; it must be an integer"):
        make(**{name: value})


def test_an_activation_that_is_none_is_named():
    with pytest.raises(ValueError, match="activation is 'silu'; it must be an Activation"):
        make(activation="silu")
