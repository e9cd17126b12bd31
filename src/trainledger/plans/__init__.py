"""A plan as integer columns, who shares what in it, and how engines cut tensors and layers."""
