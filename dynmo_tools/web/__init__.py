"""URL filter, fetch queue and HTTP client."""
