"""The model sizes of a legacy Megatron checkpoint, from its arguments and shapes; and the arguments to write. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._common.document import short_repr
from .._common.errors import UsageError
from ..huggingface.models import RACE_CHOICES
from ..io.errors import UnsupportedError
from ..tensors.views import Tensor
from .arguments import number_of

Args = Mapping[str, Any]
Merged = Mapping[str, Sequence[Tensor]]
LM = "language_model."
# Megatron has an argument for the factor only; the other values of its rotary scaling are fixed.
MEGATRON_DIVISOR = 128
MEGATRON_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TASK_HEADS = {"classification_head.": "classification", "multichoice_head.": "multichoice"}


def family_of(merged: Merged) -> str:
    """The model family, from the tensor names of all stages."""
    if any(name.startswith(f"{LM}decoder.") for name in merged):
        return "t5"
    if any(name.startswith(("lm_head.", *TASK_HEADS)) for name in merged):
        return "bert"
    # DynMo's GPT has learned positions and its Llama rotary ones, which have no tensor.
    has_positions = f"{LM}embedding.position_embeddings.weight" in merged
    return "gpt" if has_positions else "llama"


def model_of(
    path: str,
    family: str,
    args: Args,
    merged: Merged,
    layers: Mapping[str, int],
    ranks: int,
    given: Mapping[str, int | None],
    remarks: list[str],
) -> dict[str, Any]:
    """The ``model`` of a manifest: sizes from shapes, and what shapes do not show from arguments or options.

    Args:
        path: the file, for messages.
        family: the model family.
        args: the arguments of the files; may be empty.
        merged: for each name the tensors of all tensor-parallel ranks.
        layers: number of layers of ``encoder`` and ``decoder``.
        ranks: tensor-parallel size.
        given: ``vocab_size`` and ``num_attention_heads`` from the command line, or None.
        remarks: remarks for the user are appended to it.

    Raises:
        UnsupportedError: tensors that do not have the shapes of the family.
        UsageError: a size that is neither recorded nor given, or an impossible one.
    """

    def matrix_shape(name: str) -> tuple[int, ...]:
        """The shape of a weight on one tensor-parallel rank.

        Raises:
            UnsupportedError: it is missing, or not a matrix.
        """
        found = merged.get(f"{LM}{name}.weight")
        if found is None or len(found[0].shape) != 2:
            raise UnsupportedError(f"{path}: not a {family}: has no matrix {LM}{name}.weight")
        return found[0].shape

    # Before lists with an entry per layer are made of the largest number in a name.
    for stack, count in layers.items():
        if count > len(merged):
            raise UnsupportedError(
                f"{path}: has {len(merged):,} tensors, and one of layer {count - 1:,} of the {stack}; the numbers of "
                "layers must begin at 0 and have no gap"
            )
    word = matrix_shape("embedding.word_embeddings")
    padded, hidden = word[0] * ranks, word[1]
    inner = matrix_shape("encoder.layers.0.mlp.dense_h_to_4h")[0] * ranks
    heads = given["num_attention_heads"] or args.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1 or (hidden % heads and "kv_channels" not in args):
        raise UsageError(
            f"{path}: the number of heads is {short_repr(heads)}; give --num-attention-heads, a divisor of {hidden}, "
            f"or --config with the model's config.json of transformers"
        )
    epsilon = number_of(path, args, "layernorm_epsilon" if "layernorm_epsilon" in args else "norm_epsilon")
    model: dict[str, Any] = {
        "family": family,
        "num_layers": layers["encoder"],
        "hidden_size": hidden,
        # Gate and up projection are one matrix in Megatron.
        "ffn_hidden_size": inner // 2 if family == "llama" else inner,
        "num_attention_heads": heads,
        **vocabulary_sizes(args, given["vocab_size"], padded, remarks),
        "layernorm_epsilon": 1e-5 if epsilon is None else epsilon,
    }
    if family == "llama":
        return model | llama_sizes(
            path, args, matrix_shape("encoder.layers.0.self_attention.query_key_value")[0] * ranks, model
        )
    # Megatron's fused kernel of bias and GELU, its default, computes the tanh approximation.
    is_tanh = bool(args.get("bias_gelu_fusion", True) or args.get("openai_gelu", False))
    model["max_position_embeddings"] = matrix_shape("embedding.position_embeddings")[0]
    model["activation"] = "gelu_tanh" if is_tanh else "gelu"
    model["tied_embeddings"] = f"{LM}output_layer.weight" not in merged
    if family == "bert":
        types = merged.get(f"{LM}embedding.tokentype_embeddings.weight")
        model["num_tokentypes"] = types[0].shape[0] if types else 0
        model["binary_head"] = "binary_head.weight" in merged
        for prefix, head in TASK_HEADS.items():
            if f"{prefix}weight" in merged:
                classes = merged[f"{prefix}weight"][0].shape[0] if head == "classification" else RACE_CHOICES
                model |= {"task_head": head, "num_classes": classes, "tied_embeddings": False}
    if family == "t5":
        model |= {"num_encoder_layers": layers["encoder"], "num_decoder_layers": layers["decoder"]}
        model |= {"head_dim": hidden // heads, "normalization": "layernorm", "position_embedding": "learned"}
    return model


def vocabulary_sizes(args: Args, given: int | None, padded: int, remarks: list[str]) -> dict[str, int]:
    """The true and the padded number of rows of the vocabulary.

    Args:
        args: the arguments of the files; may be empty.
        given: the true number from the command line, or None.
        padded: number of rows of the embedding.
        remarks: remarks for the user are appended to it.

    Raises:
        UsageError: the true number is not between 1 and the padded one.
    """
    vocab = given or args.get("orig_vocab_size") or args.get("vocab_size")
    if not isinstance(vocab, int):
        vocab = padded
        remarks.append(
            f"the true vocabulary size is not recorded; all {padded} rows are used. --vocab-size removes padding rows"
        )
    if not 1 <= vocab <= padded:
        raise UsageError(
            f"vocabulary size {vocab} (from --vocab-size, --vocab-file or the checkpoint's arguments): must be between "
            f"1 and {padded}, the number of rows of the embedding"
        )
    return {"vocab_size": vocab, "padded_vocab_size": padded}


def llama_sizes(path: str, args: Args, qkv_rows: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that only Llama has, from Megatron's arguments and the number of rows of the qkv weight.

    Args:
        path: the file, for messages.
        args: the arguments of the files; may be empty.
        qkv_rows: number of rows of the query-key-value matrix of a layer, over all tensor-parallel ranks.
        model: the sizes known so far, with ``num_attention_heads`` and ``hidden_size``.

    Raises:
        UnsupportedError: rows and arguments contradict each other.
        UsageError: the number of positions is not recorded.
    """
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    width = args.get("kv_channels") or hidden // heads
    # The matrix has a row block for each query head, and two, key and value, for each group.
    groups = (qkv_rows // width - heads) // 2
    # Megatron-DeepSpeed records the groups under another name, and has no flag.
    recorded = (
        args.get("num_query_groups") if args.get("group_query_attention") else args.get("num_key_value_heads", heads)
    )
    if groups < 1 or heads % groups or (heads + 2 * groups) * width != qkv_rows or recorded not in (groups, None):
        raise UnsupportedError(
            f"{path}: {qkv_rows} rows of query, key and value do not fit {heads} heads of {width} in {recorded} groups"
        )
    scaling = None
    if args.get("use_rope_scaling"):
        scaling = {**MEGATRON_SCALING, "factor": float(args.get("rope_scaling_factor", 8.0))}
    positions = args.get("max_position_embeddings") or args.get("seq_length")
    if not isinstance(positions, int):
        raise UsageError(
            f"{path}: the arguments have no max_position_embeddings, which a model with rotary positions needs"
        )
    return {
        "num_key_value_heads": groups,
        "head_dim": width,
        "max_position_embeddings": positions,
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rotary",
        "rotary_base": float(args.get("rotary_base") or args.get("rope_theta") or 10000),
        "rotary_scaling": scaling,
        "tied_embeddings": not args.get("untie_embeddings_and_output_weights", True),
    }


def megatron_rows(model: Mapping[str, Any], ranks: int) -> int:
    """Number of rows of the word embedding that Megatron expects with ``ranks`` tensor-parallel ranks.

    Megatron computes it too, and refuses a table of another shape. It pads the vocabulary to a multiple of
    ``--make-vocab-size-divisible-by`` (128) times the ranks. A recorded number that is not a multiple of 128 comes from
    another divisor; it is used where the ranks divide it.
    """
    vocabulary, recorded = int(model["vocab_size"]), int(model["padded_vocab_size"])
    if recorded % MEGATRON_DIVISOR and recorded % ranks == 0:
        return recorded
    multiple = MEGATRON_DIVISOR * ranks
    return -(-vocabulary // multiple) * multiple


def legacy_args(
    model: Mapping[str, Any],
    ranks: int,
    workers: int,
    version: float,
    split_rank: int | None,
    program: str = "legacy Megatron",
) -> dict[str, Any]:
    """The arguments that Megatron's loaders compare, or from which they build the model.

    Args:
        model: the ``model`` of a manifest.
        ranks: tensor-parallel size.
        workers: number of pipeline ranks.
        version: of the checkpoint format, 0 to 3.0.
        split_rank: the first pipeline rank of a T5's decoder; None elsewhere.
        program: whose checkpoint is written, for messages.

    Raises:
        UnsupportedError: a rotary scaling or a sliding window, which a legacy checkpoint cannot store.
    """
    if model.get("sliding_window"):
        raise UnsupportedError(
            f"{program}: sliding_window {model['sliding_window']} is not supported; use --to hf or native"
        )
    size = "tensor_model_parallel_size" if version >= 3 else "model_parallel_size"
    heads = model["num_attention_heads"]
    args = {
        "num_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "ffn_hidden_size": model["ffn_hidden_size"],
        "num_attention_heads": heads,
        "kv_channels": model.get("head_dim", model["hidden_size"] // heads),
        "seq_length": model["max_position_embeddings"],
        "max_position_embeddings": model["max_position_embeddings"],
        "padded_vocab_size": megatron_rows(model, ranks),
        "orig_vocab_size": model["vocab_size"],
        "layernorm_epsilon": model["layernorm_epsilon"],
        "bias_gelu_fusion": model["activation"] == "gelu_tanh",
        "openai_gelu": False,
        "untie_embeddings_and_output_weights": not model["tied_embeddings"],
        "add_position_embedding": model["family"] != "llama",
        size: ranks,
        "pipeline_model_parallel_size": workers,
    }
    if model["family"] == "bert":
        args |= {"bert_binary_head": model.get("binary_head", False), "num_tokentypes": model.get("num_tokentypes", 0)}
    if model["family"] == "t5":
        args |= {"encoder_num_layers": model["num_layers"], "decoder_num_layers": model["num_decoder_layers"]}
        args |= {f"{side}_seq_length": model["max_position_embeddings"] for side in ("encoder", "decoder")}
        args["pipeline_model_parallel_split_rank"] = split_rank
    if model["family"] == "llama":
        args |= llama_args(model, program)
    return args


def unlike_llama3(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The stated fields of a rotary scaling that differ from the fixed values of Megatron's; all, if one is missing.

    Args:
        scaling: the ``rotary_scaling`` of a manifest's ``model``.
    """
    if scaling.get("rope_type") != MEGATRON_SCALING["rope_type"] or not MEGATRON_SCALING.keys() <= scaling.keys():
        return dict(scaling)
    return {name: scaling[name] for name, fixed in MEGATRON_SCALING.items() if scaling[name] != fixed}


def llama_args(model: Mapping[str, Any], program: str = "legacy Megatron") -> dict[str, Any]:
    """Megatron's arguments of a Llama, from the manifest's ``model``.

    Args:
        model: the ``model`` of a manifest.
        program: whose checkpoint is written, for messages.

    Raises:
        UnsupportedError: a rotary scaling that a legacy checkpoint cannot store.
    """
    heads, scaling = model["num_attention_heads"], model.get("rotary_scaling")
    groups = model.get("num_key_value_heads", heads)
    args = {
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": model["layernorm_epsilon"],
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": model.get("rotary_base", 10000.0),
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
    }
    if scaling is not None:
        if unlike := unlike_llama3(scaling):
            raise UnsupportedError(
                f"{program}: rotary scaling {short_repr(unlike)} is not supported, only {MEGATRON_SCALING}; use --to "
                "hf or native"
            )
        args |= {"use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
    return args
