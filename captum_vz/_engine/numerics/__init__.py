"""Tensors only: no module, no hook."""
