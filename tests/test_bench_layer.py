"""``bench layer``: what it computes of its times, and that it runs where there is no GPU."""

import dataclasses
import json

import pytest

from jax_b12x import cli
from jax_b12x.bench import layer
from jax_b12x.bench.measurement import Environment, Measurement, Report
from jax_b12x.moe.overlap_measured import OverlapCase, OverlapTimes

CASE = {
    "recipe": "nvfp4",
    "hidden": 64,
    "intermediate": 32,
    "num_experts": 8,
    "top_k": 2,
    "shared_format": "dense",
    "shared_intermediate": 32,
    "ranks": 1,
    "fused_order": "pre_resident",
    "split_order": "concurrent",
}


def report_of(times, **changes):
    measurements = [
        Measurement(what, {**CASE, **changes, "num_tokens": tokens}, us * 1e-6, 0.0, 1.0, 3)
        for tokens, row in times.items()
        for what, us in row.items()
    ]
    return Report("layer", {}, Environment.current(), tuple(measurements))


ALONE = {"step": 1.0, "shared": 11.0, "routed": 31.0, "serial": 41.0, "fused": 37.0, "split": 33.0}


def test_targets_are_computed_without_the_step_that_is_in_every_time():
    ((_, row),) = report_of({1: ALONE}).rows()
    made = layer.figures(row)
    assert made["over_longest"] == pytest.approx(32 / 30)
    assert made["saved"] == pytest.approx(40 / 32)
    assert made["alike"] == pytest.approx(3)


def test_where_the_shared_expert_is_joined_the_fastest_of_three_counts():
    for joined, fastest in ((32.0, 31), (34.0, 32)):
        ((_, row),) = report_of({1: {**ALONE, "joined": joined}}).rows()
        assert layer.figures(row)["over_longest"] == pytest.approx(fastest / 30)


def test_split_decode_does_not_count_for_a_recipe_that_layers_launch_fused():
    ((_, row),) = report_of({1: ALONE}, recipe="w4a16").rows()
    assert layer.figures(row)["over_longest"] == pytest.approx(36 / 30)


def test_a_split_layer_is_compared_with_its_parts():
    split = {"step": 1.0, "experts": 21.0, "all_reduce": 5.0, "layer": 28.0, "psum": 50.0}
    ((_, row),) = report_of({1: split}, ranks=2).rows()
    assert layer.figures(row) == {"over_parts": pytest.approx(27 / 24)}


def test_what_goes_into_the_measured_table_is_of_recipes_that_may_split_or_of_joined_experts():
    report = report_of({1: ALONE, 4: ALONE})
    names = ("recipe", "hidden", "intermediate", "num_experts", "top_k", "shared_format")
    case = OverlapCase(**{name: CASE[name] for name in names}, shared_intermediate=32)
    times = OverlapTimes(37.0, 33.0, report.environment.date[:10])
    assert layer.overlap_times(report) == {case: {1: times, 4: times}}
    assert layer.overlap_times(report_of({1: ALONE}, recipe="w4a16")) == {}
    packed = {"recipe": "w4a16", "shared_format": "nvfp4"}
    joined = layer.overlap_times(report_of({1: {**ALONE, "joined": 32.0}}, **packed))
    assert joined == {
        dataclasses.replace(case, **packed): {1: dataclasses.replace(times, joined=32.0)}
    }


def bench(tmp_path, *options):
    path = tmp_path / "layer.json"
    arguments = ["--shape", "64x64", "--experts", "4", "--top-k", "2", "--samples", "2"]
    assert cli.main(["bench", "layer", *arguments, *options, "--json", str(path)]) == 0
    return Report.from_json(path.read_text())


def test_it_runs_on_a_cpu(tmp_path, capsys):
    report = bench(tmp_path, "--tokens", "3", "--recipes", "nvfp4")
    rows = list(report.rows())
    assert [(case["shared_format"], case["num_tokens"]) for case, _ in rows] == [
        ("dense", 3),
        ("nvfp4", 3),
    ]
    for case, row in rows:
        packed = case["shared_format"] == "nvfp4"
        expected = ["step", "shared", "routed", "serial", "fused", "split"]
        assert list(row) == expected + ["joined"] * packed
        assert case.get("joined_order") == ("joined" if packed else None)
        assert (case["fused_order"], case["split_order"]) == ("pre_resident", "concurrent")
    assert "A layer of 4 experts of 64 x 64 a device" in capsys.readouterr().out
    json.dumps(dict(report.arguments))


def test_it_runs_over_two_cpu_devices(tmp_path, capsys):
    report = bench(tmp_path, "--tokens", "2", "--ranks", "2", "--recipes", "nvfp4")
    rows = list(report.rows())
    assert [case["shared_format"] for case, _ in rows] == ["dense", "nvfp4"]
    for case, row in rows:
        assert (case["ranks"], case["intermediate"]) == (2, 32)
        assert list(row) == ["step", "experts", "all_reduce", "layer", "psum"]
    assert "x parts" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", ["layer", "comm", "dcp"])
def test_more_ranks_than_devices_is_an_error_that_says_how_a_cpu_gets_more(benchmark, capsys):
    assert cli.main(["bench", benchmark, "--ranks", "99"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--ranks is 99; JAX sees 8 devices" in error
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=99 and NPROC=64" in error


def test_fewer_ranks_than_an_exchange_has_is_an_error(capsys):
    assert cli.main(["bench", "dcp", "--ranks", "1"]) == 2
    assert "--ranks is 1; it must be 2 or more" in capsys.readouterr().err
