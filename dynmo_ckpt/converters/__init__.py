"""Checkpoint formats: one module per format, with how to recognize, read and write it; and the registry of them."""

# Name of each built-in format -> module and attribute of its CheckpointFormat. It is not in ``registry``, so that
# ``--help`` lists the formats without importing what the registry needs.
# The order decides where two formats match. A distributed checkpoint may have a `config.json`, and a run of
# Megatron-core has the `latest_checkpointed_iteration.txt` of legacy Megatron: so dcp is before both. Any `.bin` file
# may be one of llama2.c, which is last.
BUILTIN = {
    "native": "native:NATIVE",
    "dcp": "torch_dcp:TORCH_DCP",
    "hf": "huggingface:HUGGING_FACE",
    "legacy": "legacy_megatron:LEGACY_MEGATRON",
    "deepspeed": "deepspeed:DEEPSPEED",
    "titan": "torchtitan:TORCHTITAN",
    "gguf": "gguf:GGUF",
    "llama2c": "llama2c:LLAMA2C",
}
# Formats without a reader, and without a writer.
NOT_READ = ("gguf",)
NOT_WRITTEN = ("llama2c",)
# Names of a format in other programs, as the value of --to and --from.
ALIASES = {
    **dict.fromkeys(
        ("torch_dist", "distcp", "torch_dcp", "mcore", "megatron", "megatron-core", "megatron_core"), "dcp"
    ),
    **dict.fromkeys(("legacy-megatron", "megatron-legacy"), "legacy"),
    **dict.fromkeys(("huggingface", "hugging_face", "transformers", "safetensors"), "hf"),
    **dict.fromkeys(("ds", "megatron-deepspeed"), "deepspeed"),
    **dict.fromkeys(("llama.cpp", "llamacpp"), "gguf"),
    **{"torchtitan": "titan", "dynmo": "native"},
}
