"""What a run trains on: indexed data sets, the order of samples, tokenizers."""
