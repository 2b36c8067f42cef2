"""Names and layouts of other formats as data: one JSON table a format, and the code that applies it both ways."""
