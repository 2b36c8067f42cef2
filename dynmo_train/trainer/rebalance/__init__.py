"""When layers move: the planner process, its plans, and requests for more or fewer pipeline ranks."""
