"""Sphinx configuration of the documentation site: ``make docs``."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "extensions")]

import jax_b12x  # noqa: E402, it is imported from the tree that the site describes

project = "jax_b12x"
author = "the jax_b12x authors"
copyright = f"2026, {author}"
version = release = jax_b12x.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "b12x_directives",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"jax_b12x {version}"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Docstrings are Google style; a class's Attributes section describes its fields once.
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
copybutton_prompt_text = "$ "
