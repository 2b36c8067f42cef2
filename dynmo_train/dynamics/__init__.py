"""Dynamic techniques: one file each. A technique acts between two steps and tells what it did as a profile event."""
