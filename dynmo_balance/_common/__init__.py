"""What the four packages have in common: byte-identical files, because no package imports another one."""
