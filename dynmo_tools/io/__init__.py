"""Files: JSON lines, compression, MediaWiki dumps, atomic writes, concatenation, path checks."""
