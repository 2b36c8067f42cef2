"""File formats that this package owns or reads: one module a format, over the common rules of documents."""
