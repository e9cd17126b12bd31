"""Tensors, buffers and pipeline stages as arrays over distinct rows."""
