"""The pipeline: which items stand where, the stages that run them, torch's schedules over them, and their costs."""
