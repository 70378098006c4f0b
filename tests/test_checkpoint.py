import json
import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_writer import (
    COMPRESSED,
    MODELOPT,
    MXFP4,
    PREFIX,
    fails,
    gpt_oss,
    per_expert,
    random_experts,
    same,
    stacked,
    write,
    write_file,
    write_shards,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_b12x import moe


@pytest.fixture
def rng():
    return np.random.default_rng()


# --- The layouts.


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize(
    ("convention", "config"), [("modelopt", MODELOPT), ("compressed-tensors", COMPRESSED)]
)
def test_a_tensor_for_each_expert(tmp_path, rng, convention, config, names):
    weights = random_experts(rng)
    tensors = per_expert(weights, PREFIX, convention, names)
    same(moe.load_experts(write(tmp_path, tensors, config), PREFIX), weights)
    same(moe.load_experts(tmp_path / "model.safetensors", PREFIX), weights)


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("sep", ["_", "."])
@pytest.mark.parametrize("w13", ["gate_up_proj", "w13"])
@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
def test_tensors_stacked_over_experts(tmp_path, rng, convention, w13, sep, order):
    weights = random_experts(rng, bias=True)
    tensors = stacked(weights, PREFIX, convention, order, sep, w13)
    same(moe.load_experts(write(tmp_path, tensors), PREFIX, w13_order=order), weights)


def test_stacked_weights_may_have_no_part_in_their_name(tmp_path, rng):
    weights = random_experts(rng)
    tensors = stacked(weights, PREFIX)
    tensors = {re.sub("_weight$", "", name): array for name, array in tensors.items()}
    assert f"{PREFIX}.gate_up_proj" in tensors
    same(moe.load_experts(write(tmp_path, tensors), PREFIX), weights)


def test_gpt_oss(tmp_path, rng):
    weights = random_experts(rng, "mxfp4", bias=True)
    tensors = gpt_oss(weights, PREFIX)
    assert tensors[f"{PREFIX}.gate_up_proj_blocks"].shape == (3, 64, 2, 16)
    same(moe.load_experts(write(tmp_path, tensors, MXFP4), PREFIX), weights)


def test_a_gpt_oss_model_in_modelopt_nvfp4_has_interleaved_rows(tmp_path, rng):
    weights = random_experts(rng, bias=True)
    tensors = stacked(weights, PREFIX, order="interleaved")
    config = {**MODELOPT, "model_type": "gpt_oss"}
    same(moe.load_experts(write(tmp_path, tensors, config), PREFIX), weights)


def test_a_global_scale_may_be_shared_by_gate_and_up(tmp_path, rng):
    weights = random_experts(rng)
    tensors = stacked(weights, PREFIX)
    name = f"{PREFIX}.gate_up_proj_weight_scale_2"
    tensors[name] = np.ascontiguousarray(tensors[name][:, :1])
    loaded = moe.load_experts(write(tmp_path, tensors), PREFIX)
    np.testing.assert_array_equal(loaded.w13_global_scale, np.repeat(tensors[name], 2, axis=1))


def test_input_scales_are_joined_by_their_maximum_and_are_1_if_absent(tmp_path, rng):
    tensors = per_expert(random_experts(rng), PREFIX)
    tensors[f"{PREFIX}.1.up_proj.input_scale"] = np.float32(77).reshape(())
    loaded = moe.load_experts(write(tmp_path, tensors), PREFIX)
    assert loaded.w13_input_scale == 77
    tensors = {name: array for name, array in tensors.items() if "input_scale" not in name}
    loaded = moe.load_experts(write(tmp_path, tensors), PREFIX)
    assert loaded.w13_input_scale == 1
    np.testing.assert_array_equal(loaded.w2_input_scale, np.ones(3))


def test_shards_with_an_index_and_without(tmp_path, rng):
    weights = random_experts(rng)
    tensors = list(per_expert(weights, PREFIX).items())
    rng.shuffle(tensors)
    write_shards(tmp_path, [dict(tensors[i::4]) for i in range(4)])
    same(moe.load_experts(tmp_path, PREFIX), weights)
    (tmp_path / "model.safetensors.index.json").unlink()
    same(moe.load_experts(tmp_path, PREFIX), weights)


def test_hf_quant_config_alone_declares_the_format(tmp_path, rng):
    weights = random_experts(rng)
    write(tmp_path, per_expert(weights, PREFIX))
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    same(moe.load_experts(tmp_path, PREFIX), weights)
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    fails(tmp_path, "quant_algo 'FP8'")


def test_layers_are_listed_in_their_order(tmp_path, rng):
    tensors = {"model.layers.0.mlp.gate_proj.weight": np.zeros((2, 2), np.float32)}
    tensors["model.layers.1.mlp.shared_experts.up_proj.weight"] = np.zeros((2, 2), np.float32)
    for layer in (10, 2):
        tensors |= per_expert(random_experts(rng, E=1), f"model.layers.{layer}.mlp.experts")
    write(tmp_path, tensors)
    expected = ("model.layers.2.mlp.experts", "model.layers.10.mlp.experts")
    assert moe.list_moe_layers(tmp_path) == expected
    fails(tmp_path, "no tensors under 'model.layers.3.mlp.experts'.*layers.2.mlp.experts")


# --- Where arrays go.


def test_experts_are_split_over_a_mesh(tmp_path, rng):
    weights = random_experts(rng, E=4, bias=True)
    write(tmp_path, stacked(weights, PREFIX))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
    for spec in (P("ep"), P("ep", None, None), P(("ep",))):
        loaded = moe.load_experts(tmp_path, PREFIX, device=NamedSharding(mesh, spec))
        same(loaded, weights)
        for array in jax.tree.leaves(loaded):
            assert array.sharding.device_set == set(mesh.devices.flat)
            shape = (2, *array.shape[1:]) if array.ndim else ()
            assert {shard.data.shape for shard in array.addressable_shards} == {shape}


def test_weights_without_biases_are_split_too(tmp_path, rng):
    weights = random_experts(rng, "mxfp4", E=4)
    tensors = {n: array for n, array in gpt_oss(weights, PREFIX).items() if "bias" not in n}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
    sharding = NamedSharding(mesh, P("ep"))
    same(moe.load_experts(write(tmp_path, tensors), PREFIX, device=sharding), weights)


def test_arrays_go_to_a_device_or_are_replicated(tmp_path, rng):
    weights = random_experts(rng)
    write(tmp_path, per_expert(weights, PREFIX))
    device = jax.devices()[1]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
    for where, devices in (
        (None, {jax.devices()[0]}),
        (device, {device}),
        (jax.sharding.SingleDeviceSharding(device), {device}),
        (NamedSharding(mesh, P()), set(jax.devices()[:2])),
    ):
        loaded = moe.load_experts(tmp_path, PREFIX, device=where)
        same(loaded, weights)
        assert all(array.devices() == devices for array in jax.tree.leaves(loaded))
        assert all(array.is_fully_replicated for array in jax.tree.leaves(loaded))


def test_a_device_that_is_none_or_does_not_fit_is_refused(tmp_path, rng):
    write(tmp_path, per_expert(random_experts(rng, E=3), PREFIX))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
    with pytest.raises(ValueError, match="can split the first axis only"):
        moe.load_experts(tmp_path, PREFIX, device=NamedSharding(mesh, P(None, "ep")))
    with pytest.raises(ValueError, match=r"device is .*; 3 experts do not split evenly so"):
        moe.load_experts(tmp_path, PREFIX, device=NamedSharding(mesh, P("ep")))
    for device in (P("ep"), [jax.devices()[0]], {"w13": jax.devices()[0]}, "cpu"):
        with pytest.raises(TypeError, match=f"device is of type {type(device).__name__}; it must"):
            moe.load_experts(tmp_path, PREFIX, device=device)


# --- The activation.


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_act": "silu"}, moe.SILU),
        ({"text_config": {"hidden_activation": "silu"}}, moe.SILU),
        ({**MXFP4, "hidden_act": "silu"}, moe.SWIGLU_OAI),
        ({**MXFP4, "swiglu_limit": 5}, moe.Activation("swiglu_oai", limit=5.0)),
        ({"text_config": {"model_type": "gpt_oss"}}, moe.SWIGLU_OAI),
    ],
)
def test_the_activation_is_the_one_that_the_configuration_names(tmp_path, config, expected):
    write(tmp_path, {"a": np.zeros(1, np.float32)}, config)
    assert moe.activation_of(tmp_path) == expected
    assert moe.activation_of(moe.Checkpoint(tmp_path)) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "names no activation"),
        ({}, "names no activation"),
        ({"hidden_act": "gelu"}, "says hidden_act 'gelu'; fused_moe computes silu"),
        ({"mlp_hidden_act": "relu2"}, "says mlp_hidden_act 'relu2'"),
        ({"hidden_act": "silu", "swiglu_limit": 10}, "'silu' with swiglu_limit 10"),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit 0; it must be positive"),
    ],
)
def test_an_activation_that_is_not_computed_is_named(tmp_path, config, message):
    write(tmp_path, {"a": np.zeros(1, np.float32)}, config)
    with pytest.raises(moe.CheckpointError, match=f"config.json of {tmp_path} .*{message}"):
        moe.activation_of(tmp_path)


# --- Saving.


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32 - 1),
    E=st.integers(1, 4),
    hidden=st.integers(1, 4),
    bias=st.booleans(),
)
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, seed, E, hidden, bias):
    rng = np.random.default_rng(seed)
    layers = {
        f"layers.{i}.experts": random_experts(rng, E=E, H=16 * hidden, I=16, bias=bias)
        for i in range(2)
    }
    norm = rng.standard_normal(5).astype(ml_dtypes.bfloat16)
    moe.save_experts(tmp_path, layers, tensors={"norm": norm}, config={"num_experts": E})
    checkpoint = moe.Checkpoint(tmp_path)
    assert moe.list_moe_layers(checkpoint) == tuple(layers)
    for prefix, weights in layers.items():
        same(moe.load_experts(checkpoint, prefix), weights)
    np.testing.assert_array_equal(checkpoint.tensor("norm").read(), norm)


def test_saved_files_are_read_by_the_safetensors_library(tmp_path, rng):
    weights = random_experts(rng)
    head = np.ones((2, 3), np.float32)
    moe.save_experts(tmp_path, {PREFIX: weights}, tensors={"lm_head.weight": head})
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="np") as file:
        expected = per_expert(weights, PREFIX)
        assert set(file.keys()) == {*expected, "lm_head.weight"}
        for name, array in expected.items():
            if array.dtype in (np.uint8, np.float32):
                np.testing.assert_array_equal(file.get_tensor(name), array)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt"
    assert (config["quant_algo"], config["group_size"]) == ("NVFP4", 16)
    assert config["ignore"] == ["lm_head"]
    config = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["exclude_modules"]) == ("NVFP4", ["lm_head"])


def test_files_of_the_safetensors_library_are_read(tmp_path, rng):
    tensors = {"a": rng.standard_normal((3, 4)).astype(np.float32), "b": np.arange(5)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", metadata={"k": "v"})
    checkpoint = moe.Checkpoint(tmp_path)
    assert set(checkpoint.names) == {"a", "b"}
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).read(), array)


def test_saving_refuses_what_it_cannot_store(tmp_path, rng):
    with pytest.raises(ValueError, match="are mxfp4 in the checkpoint layout"):
        moe.save_experts(tmp_path, {PREFIX: random_experts(rng, "mxfp4")})
    weights = random_experts(rng)
    name = f"{PREFIX}.0.gate_proj.weight"
    with pytest.raises(ValueError, match=f"tensors has {name}"):
        moe.save_experts(tmp_path, {PREFIX: weights}, tensors={name: np.zeros(1)})
    with pytest.raises(moe.CheckpointError, match="z has dtype complex64"):
        moe.save_experts(tmp_path, {}, tensors={"z": np.zeros(1, np.complex64)})
    write_file(tmp_path / "model-00001-of-00002.safetensors", {})
    with pytest.raises(ValueError, match="holds another checkpoint: model-00001-of-00002"):
        moe.save_experts(tmp_path, {PREFIX: weights})


# --- Memory.


@pytest.mark.parametrize("layout", ["per expert", "stacked", "interleaved"])
def test_loading_never_holds_a_dequantized_or_second_copy_of_the_experts(tmp_path, rng, layout):
    weights = random_experts(rng, E=16, H=512, I=256)
    if layout == "per expert":
        tensors = per_expert(weights, PREFIX)
    else:
        order = "gate_up" if layout == "stacked" else "interleaved"
        tensors = stacked(weights, PREFIX, order=order)
    write(tmp_path, tensors, {"model_type": "gpt_oss"} if layout == "interleaved" else None)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    loader = moe.load_experts  # imported and warm before what is measured
    same(loader(tmp_path, PREFIX), weights)
    tracemalloc.start()
    try:
        loader(tmp_path, PREFIX)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The packed arrays, an expert's worth of rows in another order, and small change.
    assert peak < nbytes + nbytes / 16 + 300_000
    assert peak < 16 * 3 * 512 * 256 * 2 / 3  # far below even bf16 weights
