"""Processes: who is where, how they agree, and random numbers that do not depend on it."""
