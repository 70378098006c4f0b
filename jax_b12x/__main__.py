"""``python -m jax_b12x``."""

import importlib.util
import sys

# In the source tree any Python finds the package, also one that has nothing it stands on.
_MISSING = [
    name for name in ("jax", "numpy", "ml_dtypes", "rich") if importlib.util.find_spec(name) is None
]
if _MISSING:
    sys.exit(
        f"error: {sys.executable} has no {', '.join(_MISSING)}. In a clone, `make build` makes an "
        "environment: use `.venv/bin/python -m jax_b12x`, or `. .venv/bin/activate` first. "
        "Elsewhere `pip install` jax_b12x into the environment of this Python."
    )

from jax_b12x.cli import main  # noqa: E402

sys.exit(main())
