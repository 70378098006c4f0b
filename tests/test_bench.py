"""The benchmark frame: records, options, timing and random data."""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_b12x.bench import data, options, plot
from jax_b12x.bench.measurement import Environment, Measurement, Report
from jax_b12x.bench.timing import take_turns


@pytest.fixture
def report():
    measurements = [
        Measurement(what, {"num_tokens": tokens, "recipe": "w4a16"}, 1e-6 * tokens, 0.0, 1.0, 3)
        for tokens in (1, 8)
        for what in ("ours", "theirs")
    ]
    return Report("toy", {"seed": 0}, Environment.current(), tuple(measurements))


def test_a_report_survives_json(report):
    assert Report.from_json(report.to_json()) == report


def test_a_report_names_date_device_and_versions(report):
    environment = report.environment
    assert environment.date.endswith("+00:00")
    assert environment.versions["jax"] == jax.__version__
    assert environment.date[:10] in str(environment)
    assert environment.devices[-1] in str(environment)


def test_rows_gather_what_was_measured_on_one_case(report):
    rows = list(report.rows())
    assert [case["num_tokens"] for case, _ in rows] == [1, 8]
    assert [list(row) for _, row in rows] == [["ours", "theirs"]] * 2
    assert rows[1][1]["ours"].microseconds == pytest.approx(8)


def test_each_call_is_timed_and_a_slower_one_takes_longer():
    x = jnp.ones(4)

    def slow():
        time.sleep(0.02)
        return x

    fast, slept = take_turns({"fast": lambda: x + 1, "slow": slow}, {"size": 4}, seconds=0.05)
    assert (fast.what, slept.what) == ("fast", "slow")
    assert slept.samples >= 7
    assert slept.low <= slept.seconds <= slept.high
    assert slept.seconds >= 0.02
    assert fast.case == {"size": 4}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (options.positives, "1, 8,64", (1, 8, 64)),
        (options.shapes, "2048x768,64x16", ((2048, 768), (64, 16))),
        (options.one_or_more_of(("a", "b")), "b,a,b", ("b", "a")),
    ],
)
def test_options_are_parsed(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (options.positive, "-1", "'-1' must be an integer from 1"),
        (options.positives, "1,two", "'two' must be an integer from 1"),
        (options.shapes, "2048", "'2048' must be hidden x intermediate, for example 2048x768"),
        (options.shapes, "0x16", "'0x16' must be hidden x intermediate"),
        (options.one_or_more_of(("a", "b")), "a,c", "'c' must be one of a, b"),
    ],
)
def test_bad_options_are_refused_with_what_would_be_right(parse, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_random_experts_have_the_layout_of_a_checkpoint(weight_format):
    block = {"nvfp4": 16, "mxfp4": 32}[weight_format]
    weights = data.random_experts(np.random.default_rng(0), 3, 128, 64, weight_format)
    assert weights.num_experts == 3
    assert weights.w13.shape == (3, 128, 64)
    assert weights.w13_scale.shape == (3, 128, 128 // block)
    assert weights.w2.shape == (3, 128, 32)
    assert weights.w2_scale.shape == (3, 128, 64 // block)
    assert bool(jnp.isfinite(weights.w13_scale.astype(jnp.float32)).all())


def test_random_experts_refuse_a_size_that_is_no_multiple_of_the_block():
    with pytest.raises(
        ValueError, match="intermediate is 40; it must be a positive multiple of 16"
    ):
        data.random_experts(np.random.default_rng(0), 1, 32, 40)


def test_random_routes_visit_different_experts_and_their_weights_sum_to_one():
    ids, weights = data.random_routes(np.random.default_rng(0), 50, 8, 4)
    assert ids.dtype == np.int32
    assert all(len(set(row)) == 4 for row in ids)
    assert (ids.min(), ids.max()) == (0, 7)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"top_k is 9; it must be from 1 to num_experts \(8\)"):
        data.random_routes(np.random.default_rng(0), 1, 8, 9)


def test_a_plot_is_drawn_into_a_file(report, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.png"
    plot.times(report, str(path), x="num_tokens", panel=("recipe",), dashed=("theirs",))
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="must end with one of"):
        plot.check("times.docx")
