"""DynMo checkpoints: inspect, verify, merge, split and convert."""

__version__ = "0.2.0"
