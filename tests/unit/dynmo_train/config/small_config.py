"""The options of a small run, as flags."""

SMALL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 1000,
    "micro_batch_size": 2,
    "train_iters": 50,
    "lr": 0.001,
    "data_path": "corpus",
}
