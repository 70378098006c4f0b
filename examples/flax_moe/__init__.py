"""A byte-level mixture-of-experts model on Flax NNX: train, quantize, evaluate, generate."""
