"""Recomputes every number of a plan without the solvers and the simulator."""
