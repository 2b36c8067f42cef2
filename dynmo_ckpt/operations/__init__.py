"""What a command does with opened checkpoints: info, verify, compare, convert, write."""
