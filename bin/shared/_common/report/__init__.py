"""A run as one self-contained HTML page: what is read, how it is reduced, and how it is drawn."""
