"""Data sets, sample order, batches and tokenizers."""
