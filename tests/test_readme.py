"""The README and the pages it leads to: their Python runs, their links lead somewhere."""

import pathlib
import re

import numpy as np
import pytest

from jax_b12x import config, moe

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("ffi", "layer", "numerics")),
]


def python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_the_python_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0).standard_normal
    experts = moe.ExpertWeights.quantize(
        *(draw(shape, np.float32) for shape in ((16, 512, 1024), (16, 512, 1024), (16, 1024, 512)))
    )
    prefix = "model.layers.0.mlp.experts"
    moe.save_experts("path/to/model", {prefix: experts}, config={"hidden_act": "silu"})
    names = {}
    blocks = [block for page in PAGES for block in python_blocks(page)]
    assert len(python_blocks(PAGES[0])) >= 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape
    assert bool((names["y"] != 0).any())
    assert names["prefix"] == prefix
    assert "nvfp4 MoE, 8 tokens" in capsys.readouterr().out


def test_every_environment_variable_is_in_the_readme():
    text = PAGES[0].read_text()
    for variable in config.ALL:
        assert f"`{variable.name}`" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
