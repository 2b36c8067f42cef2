"""Command lines and settings files of other programs, as options of this package."""
