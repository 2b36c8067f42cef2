"""Hugging Face directories: configurations, weight files, tokenizers, and the models that they describe."""
