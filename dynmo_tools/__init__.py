"""DynMo data preparation: from raw text to a clean, deduplicated, tokenized and binarized dataset."""

__version__ = "0.2.0"
