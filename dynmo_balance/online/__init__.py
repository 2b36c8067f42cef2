"""The online planner: follow a profile, decide by a policy, publish plans."""
