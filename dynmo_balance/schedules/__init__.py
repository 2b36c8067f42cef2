"""Pipeline schedules: the order of operations of every worker."""
