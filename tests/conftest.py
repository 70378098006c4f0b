"""Eight CPU devices for every test, set before JAX starts its backend; the same examples each run.

Hypothesis draws the same examples on every machine, so that a green run means the same everywhere.
To look for new ones: ``pytest --hypothesis-profile=default``.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
# With more devices than threads XLA's CPU client can wait for itself for ever, with its own
# collectives as well.
os.environ.setdefault("NPROC", "64")
