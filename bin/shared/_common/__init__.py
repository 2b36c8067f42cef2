"""What the four packages have in common: copies, because no package imports another one."""
