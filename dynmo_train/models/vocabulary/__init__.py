"""What has a row per token of the vocabulary: word table, head and loss, and their shards."""
