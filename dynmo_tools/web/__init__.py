"""URL filters and a polite fetcher: what to download, in which order, by which rules."""
