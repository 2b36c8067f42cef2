"""A mixture of experts: router, balance losses, rows by expert, and the experts themselves."""
