"""Rules over several options: one module per concern, each rule a pure function."""
