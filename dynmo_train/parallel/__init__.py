"""Process groups, collectives, parallel dimensions, and random numbers that do not depend on them."""
