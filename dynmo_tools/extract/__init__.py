"""Extracts text from MediaWiki dumps, HTML and the documentation of the installed Python."""
