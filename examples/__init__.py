"""Programs that use jax_b12x as its users would."""
