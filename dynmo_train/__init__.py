"""DynMo training: pipeline-parallel pre-training of models whose layers change cost while they train."""

__version__ = "0.2.0"
