"""Tokenizers: training, binarization to indexed datasets, operations on these."""
