"""Eight CPU devices for every test, set before JAX starts its backend."""

import os

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
# With more devices than threads XLA's CPU client can wait for itself for ever, with its own
# collectives as well.
os.environ.setdefault("NPROC", "64")
