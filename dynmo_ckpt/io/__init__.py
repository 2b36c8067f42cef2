"""Files and directories: safetensors, checksums, reading, atomic output. Independent of models and formats."""
