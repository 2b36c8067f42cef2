"""The profile and plan documents: parse, validate, write."""
