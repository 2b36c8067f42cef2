"""The commands: one file each, with its options, a thin body and what it prints."""
