"""DynMo's own checkpoints: opened by their manifest, and planned for any topology."""
