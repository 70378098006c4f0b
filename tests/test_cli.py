"""The command line: what it prints, and what a shell sees."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import jax_b12x
from jax_b12x import _native, cli
from jax_b12x.bench.measurement import Report

LAYER = ("--hidden", "2048", "--intermediate", "768", "--experts", "128", "--top-k", "8")


def run(*argv):
    """Runs the command line in this process and returns its exit status."""
    try:
        return cli.main(argv)
    except SystemExit as exit_:  # argparse leaves this way
        return exit_.code


def test_doctor_reports_versions_what_is_built_devices_and_paths(capsys):
    assert run("doctor") == 0
    out = capsys.readouterr().out
    for words in ("jax_b12x", jax_b12x.__version__, "XLA FFI API", "CPU kernels", "w4a16", "nvfp4"):
        assert words in out
    assert out.rstrip().endswith("All is well.")


def test_doctor_gives_json_of_the_same(capsys):
    assert run("doctor", "--json") == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["versions"]["jax_b12x"] == jax_b12x.__version__
    assert diagnosis["ffi_api_built"] == diagnosis["ffi_api_running"]
    assert "baseline" in diagnosis["host_isas"]
    assert {path["recipe"] for path in diagnosis["paths"]} == {"w4a16", "nvfp4"}
    assert all(path["reasons"] for path in diagnosis["paths"])


def test_doctor_fails_and_says_why_when_a_variable_is_bad(capsys, monkeypatch):
    monkeypatch.setenv("B12X_HOST_ISA", "mmx")
    assert run("doctor") == cli.FAILED
    out = " ".join(capsys.readouterr().out.split())
    assert "B12X_HOST_ISA='mmx' is not understood; allowed: auto, baseline" in out
    assert "All is well" not in out


def test_doctor_without_the_extension_names_no_path_that_would_run(capsys, monkeypatch):
    def missing():
        raise _native.NativeError("the jax_b12x extension cannot be loaded")

    monkeypatch.setattr(_native, "host", missing)
    assert run("doctor", "--json") == cli.FAILED
    diagnosis = json.loads(capsys.readouterr().out)
    assert {path["implementation"] for path in diagnosis["paths"]} == {"none"}
    assert all("extension is missing here" in path["reasons"][0] for path in diagnosis["paths"])


@pytest.fixture
def jax_without_a_platform(monkeypatch):
    """What JAX does where JAX_PLATFORMS=cuda and no CUDA plugin is installed."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)


def test_doctor_still_reports_where_jax_has_no_platform(capsys, jax_without_a_platform):
    assert run("doctor") == cli.FAILED
    out = " ".join(capsys.readouterr().out.split())
    for words in ("jaxlib", "host extension", "problem: JAX does not start its backend"):
        assert words in out
    assert "All is well" not in out


@pytest.mark.parametrize("benchmark", ["moe", "comm", "dcp"])
def test_bench_says_in_a_line_that_jax_has_no_platform(benchmark, capsys, jax_without_a_platform):
    assert run("bench", benchmark) == cli.FAILED
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: JAX has none of the platforms it is told to use")


def test_doctor_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert run("doctor") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_plan_explains_each_number_of_tokens(capsys):
    assert run("plan", *LAYER, "--tokens", "1,512", "--device", "h200") == 0
    out = capsys.readouterr().out
    assert "1 token of bfloat16[2048]" in out
    assert "512 tokens of bfloat16[2048]" in out
    assert "NVIDIA H200 (sm_90, 132 SMs" in out
    assert out.count("because") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "w2a2"), "recipe is 'w2a2'; it must be one of 'w4a16', 'nvfp4'"),
        (("--hidden", "2047"), "hidden is 2047; it must be a positive multiple of 16"),
        (("--top-k", "129"), "top_k is 129; it must be between 1 and num_experts (128)"),
        (("--device", "abacus"), "--device is 'abacus'; it must be here, cpu, h100, h200"),
        (("--activation", "relu"), "activation kind is 'relu'"),
        (("--implementation", "magic"), "implementation is 'magic'"),
        (("--tokens", "1,,2"), "'1,,2' has an empty item"),
        (("--tokens", "0"), "'0' must be an integer from 1"),
        (("--dtype", "int8"), "invalid choice: 'int8'"),
    ],
)
def test_plan_names_the_argument_that_is_wrong(arguments, message, capsys):
    assert run("plan", *LAYER, *arguments) == cli.USAGE
    assert message in capsys.readouterr().err


SMALL_BENCH = ("bench", "moe", "--shapes", "64x32", "--experts", "4", "--top-k", "2")


def test_bench_moe_times_every_path_on_every_case(capsys, tmp_path):
    path = tmp_path / "moe.json"
    assert run(*SMALL_BENCH, "--tokens", "1,2", "--seconds", "0.01", "--json", str(path)) == 0
    out = capsys.readouterr().out
    report = Report.from_json(path.read_text())
    rows = list(report.rows())
    assert [(case["recipe"], case["num_tokens"]) for case, _ in rows] == [
        (recipe, tokens) for recipe in ("w4a16", "nvfp4") for tokens in (1, 2)
    ]
    for case, row in rows:
        assert {"fused", "split", "dynamic", "oracle"} <= set(row)
        assert ("gather" in row) == (case["recipe"] == "w4a16")
        assert all(measurement.seconds > 0 for measurement in row.values())
    assert report.environment.versions["jax_b12x"] == jax_b12x.__version__
    assert "64x32" in out
    assert "…" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top-k", "5"), "--top-k is 5; it must be at most --experts (4)"),
        (("--shapes", "64"), "'64' must be hidden x intermediate"),
        (("--shapes", "64x24"), "intermediate is 24; it must be a positive multiple of 16"),
        (("--paths", "fused,warp"), "'warp' must be one of fused, split, dynamic, oracle, gather"),
        (("--paths", "fused,tokamax"), "--paths has tokamax; here it may have fused, split"),
        (("--paths", "gather", "--recipes", "nvfp4"), "gather, which measures --recipes w4a16"),
        (("--seconds", "nan"), "'nan' must be a number of seconds above 0"),
        (("--seconds", "-1"), "'-1' must be a number of seconds above 0"),
        (("--seconds", "0"), "'0' must be a number of seconds above 0"),
        (("--seconds", "inf"), "'inf' must be a number of seconds above 0"),
        (("--json", "no/such/folder/a.json"), "--json is no/such/folder/a.json; its folder"),
    ],
)
def test_bench_names_the_argument_that_is_wrong(arguments, message, capsys):
    assert run(*SMALL_BENCH, *arguments) == cli.USAGE
    assert message in capsys.readouterr().err


def test_a_missing_or_unknown_command_is_a_usage_error(capsys):
    assert run() == cli.USAGE
    assert "required: COMMAND" in capsys.readouterr().err
    assert run("dance") == cli.USAGE
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_a_python_without_the_dependencies_is_told_which_to_use():
    root = str(pathlib.Path(jax_b12x.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-m", "jax_b12x", "doctor"],  # -S: without site-packages
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root},
        cwd=root,
    )
    assert done.returncode == cli.FAILED
    assert "has no jax, numpy, ml_dtypes, rich." in done.stderr
    assert "`.venv/bin/python -m jax_b12x`" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_module_runs_as_a_program_and_survives_a_closed_pipe():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jax_b12x"]
    version = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, env=environment, check=True
    )
    assert version.stdout.strip() == f"jax_b12x {jax_b12x.__version__}"
    with subprocess.Popen(
        [*command, "doctor", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        process.stdout.close()
        assert "BrokenPipe" not in process.stderr.read().decode()
