"""Offline analysis of plans and runs: what-if sweeps, schedule search, replay, calibration, comparison."""
