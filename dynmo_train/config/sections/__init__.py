"""The options of a run, one module per concern, in the order of the help pages."""
