"""Resources that a configuration would use, computed without running it."""
