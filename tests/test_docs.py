"""The documentation is true: its code runs, its messages exist, its reference is whole."""

import ast
import importlib
import pathlib
import re

import pytest

from jax_b12x import config

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def blocks(page, language):
    """Returns (line, text) of each fenced block of one language."""
    text = (DOCS / page).read_text()
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
        yield text.count("\n", 0, match.start()) + 2, match[1]


def test_the_tutorial_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for line, code in blocks("tutorial.md", "python"):
        # Padding makes the lines of a traceback those of the page.
        exec(compile("\n" * (line - 1) + code, str(DOCS / "tutorial.md"), "exec"), names)
    printed = capsys.readouterr().out
    assert "('model.layers.0.mlp.experts', 'model.layers.1.mlp.experts')" in printed
    assert "(8, 256) bfloat16" in printed
    assert "because" in printed


def test_the_page_on_the_layer_runs_as_it_is_written(capsys):
    names = {}
    for line, code in blocks("layer.md", "python"):
        exec(compile("\n" * (line - 1) + code, str(DOCS / "layer.md"), "exec"), names)
    assert "MoE layer of 8 experts of 128 x 256" in capsys.readouterr().out
    assert names["y"].shape == names["x"].shape


def python_messages(path):
    """Yields every string of a Python file, with {} for what an f-string fills in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_example_of_a_plan_runs(capsys):
    ((_, code),) = blocks("how-it-works.md", "python")
    exec("import jax.numpy as jnp\nfrom jax_b12x import moe\n" + code, {})
    assert "because" in capsys.readouterr().out


LITERAL = r'"((?:[^"\\\n]|\\.)*)"'


def other_messages(path):
    """Returns the strings of a C++ or CMake file in one, with {} between those that code joins."""
    strings = []
    for adjacent in re.finditer(rf"{LITERAL}(?:\s*{LITERAL})*", path.read_text()):
        strings.append("".join(re.findall(LITERAL, adjacent[0])).replace('\\"', '"'))
    return "{}".join(strings)


@pytest.fixture(scope="module")
def messages():
    found = []
    for folder in ("jax_b12x", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            found += python_messages(path)
    for folder, suffix in (("ffi", ".cc"), ("ffi", ".h"), ("cmake", ".cmake")):
        for path in (ROOT / folder).rglob(f"*{suffix}"):
            found.append(other_messages(path))
    return [re.sub(r"\$\{\w+\}", "{}", message) for message in found]


def quoted():
    return [
        pytest.param(message, id=f"line {line + offset}")
        for line, text in blocks("troubleshooting.md", "text")
        for offset, message in enumerate(text.splitlines())
    ]


@pytest.mark.parametrize("message", quoted())
def test_a_message_in_troubleshooting_is_one_that_the_code_says(message, messages):
    fragments = [re.escape(part) for part in message.split("<...>")]
    pattern = re.compile(".{0,200}?".join(fragments), re.S)
    assert sum(map(len, message.split("<...>"))) > 8, "too short to be looked for"
    assert any(pattern.search(said) for said in messages)


def test_a_message_that_no_code_says_would_be_noticed(messages):
    pattern = re.compile("the extension is on strike")
    assert not any(pattern.search(said) for said in messages)


@pytest.mark.parametrize("room", ["moe", "moe.routing", "quant"])
def test_the_reference_has_every_public_name(room):
    reference = "".join(path.read_text() for path in (DOCS / "api").glob("*.rst"))
    module = importlib.import_module(f"jax_b12x.{room}")
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    missing = [name for name in names if not re.search(rf"jax_b12x\.{room}\.{name}\b", reference)]
    assert not missing, f"add them to docs/api/{room.split('.')[0]}.rst"


def test_every_environment_variable_has_a_meaning_and_allowed_forms():
    # docs/environment.md is made of these.
    for variable in config.ALL:
        assert variable.meaning.endswith("."), variable.name
        assert variable.allowed, variable.name
