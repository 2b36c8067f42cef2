"""The optimizers of ``--optimizer``: one module each, one line each in the registry."""
