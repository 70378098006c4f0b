import json
import re

import ml_dtypes
import numpy as np
import pytest
from checkpoint_writer import (
    COMPRESSED,
    MXFP4,
    PREFIX,
    fails,
    first,
    gpt_oss,
    per_expert,
    random_experts,
    same,
    stacked,
    write,
    write_file,
    write_shards,
)

from jax_b12x import moe


@pytest.fixture
def rng():
    return np.random.default_rng()


# --- Damage. Each error names the tensor, and the file where there is one.


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, rng):
    write(tmp_path, per_expert(random_experts(rng), PREFIX))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 5, 8, header // 2, header - 1, header, (header + len(whole)) // 2):
        path.write_bytes(whole[:size])
        fails(tmp_path, r"model\.safetensors.*truncated")
    path.write_bytes(whole[:-1])
    fails(tmp_path, r"2\.down_proj\.input_scale .*truncated: it ends at byte")


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    for content, message in (
        (b"\xff" * 64, "a header of"),
        (b"\x04" + bytes(7) + b"nope", "not a safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "no JSON object"),
        (b"\x12" + bytes(7) + b'{"a":{"dtype":"U"}}'[:18], "not a safetensors file"),
        (b"\x11" + bytes(7) + b'{"a":{"dtype":3}}', "entry of a is malformed"),
    ):
        path.write_bytes(content)
        fails(tmp_path, message)
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    path.write_bytes(bytes([len(text)]) + bytes(7) + text + bytes(8))
    fails(tmp_path, r"a \(F32\[2\].*data_offsets \[0, 4\]; it needs 8 bytes")
    path.unlink()
    fails(tmp_path, "holds neither model.safetensors.index.json nor")
    fails(tmp_path / "nowhere", "no such file or directory")


def test_a_tensor_that_its_shard_does_not_hold_is_named(tmp_path, rng):
    tensors = per_expert(random_experts(rng), PREFIX)
    write_shards(tmp_path, [dict(list(tensors.items())[:20]), dict(list(tensors.items())[20:])])
    name = first(tensors, ".0.up_proj.weight_scale")
    shard = dict(list(tensors.items())[:20])
    del shard[name]
    write_file(tmp_path / "model-00001-of-00002.safetensors", shard)
    fails(tmp_path, f"{name} is missing from .*model-00001-of-00002.safetensors, where")


def test_a_missing_shard_is_named(tmp_path, rng):
    tensors = per_expert(random_experts(rng), PREFIX)
    write_shards(tmp_path, [dict(list(tensors.items())[:20]), dict(list(tensors.items())[20:])])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    fails(tmp_path, "is missing: its shard .*model-00002-of-00002.safetensors does not exist")


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards_is_named(tmp_path, rng, indexed):
    tensors = list(per_expert(random_experts(rng), PREFIX).items())
    write_shards(tmp_path, [dict(tensors[:21]), dict(tensors[20:])])
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    fails(tmp_path, f"{re.escape(tensors[20][0])} .*holds a tensor of this name too")


def test_a_bad_index_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (("{", "cannot be read as JSON"), ("[]", "no JSON object")):
        index.write_text(text)
        fails(tmp_path, message)
    index.write_text("{}")
    fails(tmp_path, "has no weight_map")


PARTS = ["weight", "weight_scale", "weight_scale_2", "input_scale"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_tensor_is_named(tmp_path, rng, projection, part):
    tensors = per_expert(random_experts(rng), PREFIX)
    name = f"{PREFIX}.1.{projection}.{part}"
    del tensors[name]
    fails(write(tmp_path, tensors), re.escape(f"{name} is missing"))


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_a_missing_stacked_tensor_is_named(tmp_path, rng, part):
    tensors = gpt_oss(random_experts(rng, "mxfp4", bias=True), PREFIX)
    name = f"{PREFIX}.down_proj_{part}"
    del tensors[name]
    fails(write(tmp_path, tensors), re.escape(f"{name} is missing"))


def test_a_missing_expert_is_named(tmp_path, rng):
    tensors = per_expert(random_experts(rng), PREFIX)
    tensors = {name: array for name, array in tensors.items() if f"{PREFIX}.1." not in name}
    fails(write(tmp_path, tensors), re.escape(f"{PREFIX}.1.gate_proj.weight is missing"))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_shape_or_dtype_that_does_not_match_is_named(tmp_path, rng, projection, part, change):
    tensors = per_expert(random_experts(rng), PREFIX)
    name = f"{PREFIX}.2.{projection}.{part}"
    if change == "shape":
        tensors[name] = np.repeat(np.atleast_1d(tensors[name]), 3, axis=-1)
    else:
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    words = "its shape must be" if change == "shape" else r"its dtype must be|not packed \(U8\)"
    fails(write(tmp_path, tensors), rf"{re.escape(name)} \(.*({words})")


def test_columns_that_do_not_fill_blocks_are_refused(tmp_path, rng):
    tensors = per_expert(random_experts(rng), PREFIX)
    tensors = {
        name: array[:, :12] if name.endswith("gate_proj.weight") else array
        for name, array in tensors.items()
    }
    fails(
        write(tmp_path, tensors), "0.gate_proj.weight .*hidden is 24; nvfp4 needs a multiple of 16"
    )


def test_a_transposed_stack_is_refused(tmp_path, rng):
    tensors = stacked(random_experts(rng), PREFIX)
    tensors = {
        name: array.swapaxes(1, 2) if array.ndim == 3 else array for name, array in tensors.items()
    }
    fails(write(tmp_path, tensors), f"{PREFIX}.gate_up_proj_weight_scale .*shape must be")


@pytest.mark.parametrize("value", [0.0, np.inf, -np.inf, np.nan, -1.0, 1e-40])
@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("part", [2, 3])
def test_a_global_scale_that_is_no_scale_is_named(tmp_path, rng, convention, part, value):
    tensors = per_expert(random_experts(rng), PREFIX, convention)
    suffix = {"modelopt": ("weight_scale_2", "input_scale")}.get(
        convention, ("weight_global_scale", "input_global_scale")
    )[part - 2]
    name = f"{PREFIX}.1.up_proj.{suffix}"
    tensors[name] = np.full_like(tensors[name], value)
    fails(write(tmp_path, tensors), rf"{re.escape(name)} .*holds .*must be positive")


@pytest.mark.parametrize(("bits", "word"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative")])
def test_a_block_scale_that_is_no_scale_is_named(tmp_path, rng, bits, word):
    tensors = per_expert(random_experts(rng), PREFIX)
    name = f"{PREFIX}.2.down_proj.weight_scale"
    tensors[name] = tensors[name].copy()
    tensors[name].view(np.uint8)[5, 1] = bits
    message = rf"{re.escape(name)} .*block scale of expert 2 at row 5, block 1 is {word}"
    fails(write(tmp_path, tensors), message)


def test_a_nan_mx_scale_is_named(tmp_path, rng):
    tensors = gpt_oss(random_experts(rng, "mxfp4"), PREFIX)
    tensors = {name: array for name, array in tensors.items() if "bias" not in name}
    name = f"{PREFIX}.down_proj_scales"
    tensors[name] = tensors[name].copy()
    tensors[name][1, 7, 0] = 0xFF
    fails(write(tmp_path, tensors), "down_proj_scales .*expert 1 at row 7, block 0 is NaN")


def test_mixed_layouts_are_refused(tmp_path, rng):
    weights = random_experts(rng)
    modelopt = per_expert(weights, PREFIX)
    compressed = per_expert(weights, PREFIX, "compressed-tensors")
    pick = {name: array for name, array in compressed.items() if f"{PREFIX}.2." in name}
    rest = {name: array for name, array in modelopt.items() if f"{PREFIX}.2." not in name}
    fails(write(tmp_path, rest | pick), "2.gate_proj.weight_packed .*compressed-tensors layout")
    whole = {name: array for name, array in stacked(weights, PREFIX).items() if "down" in name}
    rest = {name: array for name, array in modelopt.items() if "down" not in name}
    fails(write(tmp_path, rest | whole), "mixed with .*stacked over experts")
    stack = stacked(weights, PREFIX)
    split = {f"{PREFIX}.gate_proj_weight": stack[f"{PREFIX}.gate_up_proj_weight"]}
    fails(write(tmp_path, stack | split), "gate_proj_weight .*mixed with .*gate and up in one")
    twice = {f"{PREFIX}.0.w1.weight": modelopt[f"{PREFIX}.0.gate_proj.weight"]}
    fails(write(tmp_path, modelopt | twice), "0.w1.weight .*says the same as .*gate_proj.weight")


def test_tensors_that_are_not_understood_are_refused(tmp_path, rng):
    tensors = per_expert(random_experts(rng), PREFIX)
    tensors[f"{PREFIX}.0.gate_proj.pre_quant_scale"] = np.ones(64, np.float32)
    fails(write(tmp_path, tensors), "pre_quant_scale .*no tensor that load_experts knows")


def test_dense_experts_are_refused_with_advice(tmp_path):
    tensors = {f"{PREFIX}.0.gate_proj.weight": np.ones((32, 64), ml_dtypes.bfloat16)}
    fails(write(tmp_path, tensors), "0.gate_proj.weight .*not packed.*ExpertWeights.quantize")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (COMPRESSED, "declares compressed-tensors; the tensors are laid out as modelopt"),
        (MXFP4, "declares mxfp4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "declares quant_method 'gptq'"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
            "declares quant_algo 'FP8'",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "x"}},
            "declares format 'x'",
        ),
        ({"num_experts": 4}, "has 3 experts; config.json of .* says num_experts 4"),
        ({"text_config": {"num_local_experts": 8}}, "says num_local_experts 8"),
        ({"hidden_size": 128}, "has hidden 64, from .* says hidden_size 128"),
        ({"text_config": {"hidden_size": 32}}, "has hidden 64, from .* says hidden_size 32"),
        ({"moe_intermediate_size": 16}, "has intermediate 32, from .*moe_intermediate_size 16"),
        (
            {"text_config": {"moe_intermediate_size": 64}},
            "has intermediate 32, from .*moe_intermediate_size 64",
        ),
        (
            {"model_type": "mixtral", "intermediate_size": 64},
            "has intermediate 32, from .* says intermediate_size 64",
        ),
        (
            {"text_config": {"model_type": "llama4_text", "intermediate_size": 64}},
            "has intermediate 32, from .* says intermediate_size 64",
        ),
        (
            {
                "quantization_config": {
                    **COMPRESSED["quantization_config"],
                    "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                }
            },
            "declares format 'nvfp4-pack-quantized', weights of num_bits 8",
        ),
        ({"quantization_config": "nvfp4"}, "quantization_config that is no JSON object: 'nvfp4'"),
        ({"quantization_config": []}, "quantization_config that is no JSON object"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_refused(tmp_path, rng, config, message):
    fails(write(tmp_path, per_expert(random_experts(rng), PREFIX), config), message)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 4096},
        {"model_type": "deepseek_v3", "intermediate_size": 4096},
        {"hidden_size": 999, "text_config": {"hidden_size": 64}},
        {"hidden_size": 128, "moe_latent_size": 64},
        {"model_type": "mixtral", "intermediate_size": 32, "moe_intermediate_size": None},
        {"quantization_config": None},
    ],
)
def test_a_configuration_that_speaks_of_other_layers_too_is_accepted(tmp_path, rng, config):
    weights = random_experts(rng)
    same(moe.load_experts(write(tmp_path, per_expert(weights, PREFIX), config), PREFIX), weights)


def test_compressed_tensors_of_four_bits_are_accepted(tmp_path, rng):
    weights = random_experts(rng)
    groups = {"group_0": {"weights": {"num_bits": 4}}}
    config = {"quantization_config": {**COMPRESSED["quantization_config"], "config_groups": groups}}
    tensors = per_expert(weights, PREFIX, "compressed-tensors")
    same(moe.load_experts(write(tmp_path, tensors, config), PREFIX), weights)


@pytest.mark.parametrize("order", ["up_gate", "interleaved"])
def test_a_row_order_is_refused_where_names_already_tell(tmp_path, rng, order):
    weights = random_experts(rng)
    write(tmp_path, per_expert(weights, PREFIX))
    with pytest.raises(ValueError, match=f"w13_order is '{order}'.* their names already tell"):
        moe.load_experts(tmp_path, PREFIX, w13_order=order)
    same(moe.load_experts(tmp_path, PREFIX, w13_order="gate_up"), weights)


def test_a_prefix_that_is_too_short_is_refused_with_the_one_it_should_be(tmp_path, rng):
    tensors = per_expert(random_experts(rng), PREFIX)
    tensors["model.layers.3.mlp.gate.weight"] = np.zeros((3, 64), np.float32)
    write(tmp_path, tensors)
    for prefix in ("model.layers.3.mlp", "model"):
        fails(tmp_path, f"prefix '{prefix}' is too short; it should be {PREFIX} ", prefix)


def test_a_prefix_that_is_no_name_is_refused(tmp_path, rng):
    write(tmp_path, per_expert(random_experts(rng), PREFIX))
    with pytest.raises(TypeError, match="prefix is 0; it must be a name"):
        moe.load_experts(tmp_path, 0)


def test_saving_refuses_what_is_no_mapping_of_weights(tmp_path, rng):
    weights = random_experts(rng)
    folder = tmp_path / "model"
    with pytest.raises(TypeError, match="experts is of type ExpertWeights; it must be a mapping"):
        moe.save_experts(folder, weights)
    with pytest.raises(TypeError, match=f"experts has list under '{PREFIX}'"):
        moe.save_experts(folder, {PREFIX: [weights]})
    with pytest.raises(TypeError, match="experts has ExpertWeights under 0"):
        moe.save_experts(folder, {0: weights})
    assert not folder.exists()


def test_a_file_that_was_not_really_downloaded_is_recognised(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    fails(tmp_path, "model.safetensors: is a Git LFS pointer")
    for page in ("<!DOCTYPE html><title>Sign in</title>", "\ufeff\n  <html></html>"):
        path.write_text(page, encoding="utf-8")
        fails(tmp_path, "model.safetensors: is an HTML or XML page")


def test_a_header_whose_length_looks_like_an_opening_bracket_is_read(tmp_path):
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(ord("<"))
    (tmp_path / "model.safetensors").write_bytes(b"<" + bytes(7) + text + b"\x07")
    assert moe.Checkpoint(tmp_path).tensor("a").read() == 7


@pytest.mark.parametrize("where", ["../x.safetensors", "a/../../x.safetensors", "/x", 3])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, rng, where):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = random_experts(rng)
    tensors = per_expert(weights, PREFIX)
    write_file(tmp_path / "x.safetensors", tensors)
    if where == "/x":
        where = str(tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, where)}))
    fails(folder, f"weight_map says that .* is in {re.escape(repr(where))}; a shard must be")


def test_an_index_may_name_shards_in_a_folder_below(tmp_path, rng):
    weights = random_experts(rng)
    tensors = per_expert(weights, PREFIX)
    (tmp_path / "shards").mkdir()
    write_file(tmp_path / "shards" / "x.safetensors", tensors)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "shards/x.safetensors")}))
    same(moe.load_experts(tmp_path, PREFIX), weights)


def test_an_unknown_row_order_is_refused(tmp_path, rng):
    write(tmp_path, per_expert(random_experts(rng), PREFIX))
    with pytest.raises(ValueError, match="w13_order is 'both'"):
        moe.load_experts(tmp_path, PREFIX, w13_order="both")
