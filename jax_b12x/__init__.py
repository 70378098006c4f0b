"""Mixture-of-experts decode kernels and one-shot collectives for JAX, as XLA FFI custom calls."""

__version__ = "0.1.0"
