"""Moving layers between workers while training goes on: the planner's process, the decision, the two-phase move."""
