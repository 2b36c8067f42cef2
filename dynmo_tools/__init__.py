"""DynMo data preparation: from raw text to a clean, deduplicated, tokenized and binarized data set."""

__version__ = "0.1.0"
