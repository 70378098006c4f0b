"""``python -m jax_b12x``."""

import sys

from jax_b12x.cli import main

sys.exit(main())
