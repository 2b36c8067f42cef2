"""DynMo planning: offline and online load-balance planning, simulation and what-if for pipelines."""

__version__ = "0.2.0"
