"""One file for each family or group of cousins: `read(model, config)` gives the Semantics of its forward pass.

Every rule and default is that of the family's classes in transformers 5.24.0 (configuration_NAME.py, modeling_NAME.py).
"""
