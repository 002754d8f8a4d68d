"""Measurements of speed and memory. ``python -m benchmarks --help`` lists them; results lie in ``results/``."""
