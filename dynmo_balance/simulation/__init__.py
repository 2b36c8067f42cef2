"""Simulation of a training step: discrete events, batched simulation, bounds, throughput."""
