"""Text from MediaWiki markup, HTML and the documentation of the installed Python."""
