"""Simulation of a training step: discrete events, batched, bounds, throughput."""
