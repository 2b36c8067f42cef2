"""Any supported input as a native checkpoint: format detection, and one reader a format."""
