"""Near-duplicates: MinHash signatures, LSH bands, verified pairs, groups, removal."""
