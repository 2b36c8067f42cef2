"""Plans: partition, prediction, certificate and migration."""
