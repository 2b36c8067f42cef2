"""Evaluation, fine-tuning and text generation on a trained checkpoint."""
