"""Tokenizers: training, binarization to indexed data sets, operations on these."""
