"""Compares the logits of two checkpoints on fixed random tokens.

A Hugging Face directory is computed by transformers, which shares no code with the name maps; a checkpoint of any other
format by ``reference_model``, in numpy.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.console import print_message
from .._common.errors import MissingExtraError, UsageError
from ..huggingface.decoders import DECODERS
from ..huggingface.files import read_config
from ..huggingface.models import LAYER_NORMS, hf_config
from ..io.computed import stored_inputs
from ..io.errors import CorruptError, UnsupportedError, short_names
from ..maps.decoder_fields import GATED
from ..native.checkpoint import NativeCheckpoint
from ..tensors.computed import arrays_of
from ..tensors.computed import is_computed as is_computed_tensor
from .local_copy import local_copy
from .reference_model import Array, Ids, model_logits

if TYPE_CHECKING:
    from collections.abc import Iterator

HF = "hf"
NUM_TOKENS = 64
BUDGET_PARAMETERS = 200_000_000
ATOL = 1e-4
# The tanh approximation of GELU differs from the exact one by up to 5e-4 per element, in the one layer of BERT's head.
HEAD_GELU_ATOL = 2e-2
KEYS_OF_SOURCE = ("missing_keys", "mismatched_keys")
KEYS_OF_TARGET = (*KEYS_OF_SOURCE, "unexpected_keys")
# They are float32 in files of every type.
EXPERT_BIASES = "e_score_correction_bias"
TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
FAILURES = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
Logits = tuple[Array, Array | None]


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """The comparison of a conversion's input with its output.

    Attributes:
        source: the opened input.
        source_format: the format of the input.
        target_format: the format of the output.
        dtype: the type to which the weights are rounded, as in safetensors; None: not rounded.
        required: compare a model of any size; False skips a model above the budget and logs that.
        is_compressed: the output has sparse weights, which transformers computes only with another package.
    """

    source: NativeCheckpoint
    source_format: str
    target_format: str
    dtype: str | None
    required: bool = False
    is_compressed: bool = False

    def skip_reason(self) -> str:
        """Why the logits are not compared; empty where they are.

        Raises:
            MissingExtraError: the comparison is required and needs a package that is not installed.
            UsageError: the comparison is required, and the output cannot be read here.
        """
        from ..converters.registry import get_format

        if get_format(self.target_format).read is None:
            if self.required:
                raise UsageError(f"--check-logits: {self.target_format} is only written, and cannot be computed here")
            return f"{self.target_format} is only written"
        reason = unsupported_reason(self.source.manifest["model"])
        if reason:
            return reason
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if HF in (self.source_format, self.target_format) and missing:
            if self.required:
                raise MissingExtraError(missing[0], "hf")
            return f"{missing[0]} is not installed"
        entries = self.source.manifest["tensors"]
        count = sum(math.prod(entries[name]["shape"]) for name in self.source.weights())
        if count > BUDGET_PARAMETERS and not self.required:
            return f"{count:,} parameters are more than {BUDGET_PARAMETERS:,}; --check-logits compares any model"
        return ""

    def _files_of_source(self) -> list[Path]:
        """The files of the input that transformers reads: those with tensors, and JSON files next to them."""
        arrays = [array for tensor in self.source.tensors.values() for array in arrays_of(tensor)]
        paths = dict.fromkeys(stored.path for array in arrays for stored in stored_inputs(array))
        directory = self.source.directory
        # Tensors of compressed files were unpacked to the disk, so their paths do not name the files.
        if not all(path.is_relative_to(directory) for path in paths):
            return list(directory.rglob("*"))
        return [*paths, *directory.glob("*.json")]

    def compare(self, target: Path) -> dict[str, Any]:
        """Compare the input with an output.

        Args:
            target: the directory of the output.

        Returns:
            As :func:`difference`.

        Raises:
            UnsupportedError: their logits differ by more than the limit.
            CorruptError: transformers cannot compute one of them.
            MissingExtraError: transformers is needed and not installed.
            StorageError: the disk has no space for a local copy of an address.
        """
        from ..converters.registry import DEFAULT_READ, get_format

        model = self.source.manifest["model"]
        tokens = fixed_tokens(model)
        # transformers cannot compute what this conversion computes: dequantized weights, or a merged adapter; nor
        # does it find renamed ones.
        is_computed = self.source.is_renamed or any(map(is_computed_tensor, self.source.tensors.values()))
        if self.source_format == HF and not is_computed:
            with _suggest_option(), local_copy(self.source.directory, self._files_of_source()) as directory:
                before = hf_logits(directory, model, tokens, self.dtype, is_source=True)
        else:
            # Rounded to the type of the output first: --dtype must not count as a difference.
            before = model_logits(self.source, tokens, self.dtype)
        if self.target_format == HF and not self.is_compressed:
            with _suggest_option(), local_copy(target, target.rglob("*")) as directory:
                after = hf_logits(directory, model, tokens)
        else:
            # Not open_checkpoint: it refuses an address whose upload is not complete.
            read = get_format(self.target_format).read
            if read is None:  # refused by skip_reason; narrows the type
                raise UsageError(f"--check-logits: {self.target_format} is only written")
            after = model_logits(read(target, DEFAULT_READ)[0], tokens)
        found = difference(before, after, str(target))
        scale = max(1.0, float(np.abs(before[0]).max()))
        exact_head = model["family"] != "bert" or model["activation"] == "gelu" or model.get("task_head")
        # Relative to the largest logit, as rounding is.
        limit = scale * (ATOL if exact_head else HEAD_GELU_ATOL)
        # Not ``>``: a difference of NaN must be refused as well.
        if not found["max_abs"] <= limit:
            raise UnsupportedError(
                f"the logits of input and output differ by {found['max_abs']:.3g}; the limit is {limit:.3g}. The "
                "output would compute something else, and was removed; --no-check-logits writes it anyway"
            )
        return found


def compare_logits(check: LogitsCheck | None, target: Path) -> Mapping[str, Any] | None:
    """Compare the logits of input and output before the output appears; None, and a log line, where they are not."""
    if check is None:
        return None
    if reason := check.skip_reason():
        print_message(f"logits of input and output were not compared: {reason}")
        return None
    found = check.compare(target)
    print_message(f"logits of input and output differ by at most {found['max_abs']:.3g} on {found['tokens']} tokens")
    return found


def unsupported_reason(model: Mapping[str, Any]) -> str:
    """Why ``reference_model`` does not implement a model; empty where it does."""
    family = model["family"]
    relative = family == "t5" and model.get("position_embedding") == "relative"
    if family == "ict":
        return "the two towers of an ict have no token logits"
    unlike: dict[str, Any] = {}
    if family not in ("gpt", "llama"):
        needed = {"normalization": "rmsnorm"} if relative else LAYER_NORMS
        unlike = {field: model[field] for field, value in needed.items() if model.get(field, value) != value}
        unlike |= {"activation": model["activation"]} if model["activation"] in GATED else {}
    if model.get("moe_routing", "topk") != "topk" or (model.get("num_experts") and "moe_top_k" not in model):
        unlike["moe_routing"] = model.get("moe_routing")
    return f"the reference model of a {family} does not implement {unlike}" if unlike else ""


def fixed_tokens(model: Mapping[str, Any], num_tokens: int = NUM_TOKENS) -> Ids:
    """Two random sequences of token ids, the same in every call.

    Args:
        model: the ``model`` of a manifest.
        num_tokens: length of each sequence; at most the number of positions is used.

    Returns:
        Token ids ``[2, T]`` int64, below the true vocabulary size.
    """
    count = min(num_tokens, model["max_position_embeddings"])
    return np.random.default_rng(0).integers(0, model["vocab_size"], (2, count))


def hf_difference(checkpoint: NativeCheckpoint, directory: Path, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """Compare a checkpoint with what transformers computes in float32 from a Hugging Face directory.

    Args:
        checkpoint: any format.
        directory: the Hugging Face directory.
        num_tokens: length of each of the two random sequences.

    Returns:
        The largest absolute difference of a logit, the number of tokens, and whether all argmax tokens are equal.

    Raises:
        MissingExtraError: transformers is not installed.
        CorruptError: transformers cannot open the directory, or reports missing or unexpected weights.
    """
    model = checkpoint.manifest["model"]
    tokens = fixed_tokens(model, num_tokens)
    return difference(hf_logits(directory, model, tokens), model_logits(checkpoint, tokens), str(directory))


def difference(found: Logits, expected: Logits, what: str) -> dict[str, Any]:
    """The differences of two results.

    Args:
        found: token logits ``[T, V]``, and logits of BERT's binary head ``[2]`` or None.
        expected: the same of the other checkpoint.
        what: the checkpoint, for messages.

    Raises:
        CorruptError: the shapes differ.
    """
    pairs = [(found[0], expected[0])]
    if found[1] is not None and expected[1] is not None:
        pairs.append((found[1], expected[1]))
    if (found[1] is None) != (expected[1] is None) or any(one.shape != other.shape for one, other in pairs):
        raise CorruptError(f"{what}: the logits have the shape {found[0].shape}, expected {expected[0].shape}")
    gaps = [float(np.abs(one - other).max()) for one, other in pairs]
    return {
        # max() may drop a NaN; a NaN in either result must fail the comparison.
        "max_abs": math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps),
        "tokens": len(found[0]),
        "same_best_tokens": bool((found[0].argmax(-1) == expected[0].argmax(-1)).all()),
    }


def hf_logits(
    directory: Path, model: Mapping[str, Any], tokens: Ids, dtype: str | None = None, *, is_source: bool = False
) -> Logits:
    """Logits of transformers in float32; shapes as those of ``reference_model.model_logits``.

    Args:
        directory: a Hugging Face directory.
        model: the ``model`` of its manifest.
        tokens: token ids, ``[2, T]`` int64.
        dtype: the type to which the weights are rounded first, as in safetensors.
        is_source: the directory is the input of a conversion. It may have tensors that neither transformers nor the
            map reads, such as the causal masks of GPT-2, and those that ``--drop`` leaves out.

    Raises:
        MissingExtraError: torch or transformers is not installed.
        CorruptError: transformers cannot open it, or reports missing or unexpected weights.
    """
    try:
        import torch

        transformers: Any = importlib.import_module("transformers")
        strict = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    # Newer releases of huggingface_hub check configurations with an error class of their own.
    failures = (*FAILURES, getattr(strict, "StrictDataclassError", ValueError))
    with _silent(transformers):
        try:
            opened = getattr(transformers, _class_name(directory, model))
            weight_type = {dtype_argument(transformers.__version__): torch.float32}
            loaded, found = opened.from_pretrained(directory, output_loading_info=True, **weight_type)
            # Classes of language models have no layers of multi-token prediction, which change no logit.
            first, depths = model["num_layers"], model.get("mtp_num_layers", 0)
            further = tuple(f"model.layers.{first + k}." for k in range(depths))
            found["unexpected_keys"] = [name for name in found["unexpected_keys"] if not name.startswith(further)]
            _refuse_unlike(directory, found, KEYS_OF_SOURCE if is_source else KEYS_OF_TARGET)
            if dtype is not None:
                # Rounded and kept in float32: the matrix products of both sides then have the same precision.
                stored = loaded.state_dict().items()
                for tensor in (each for name, each in stored if not name.endswith(EXPERT_BIASES)):
                    tensor.copy_(tensor.to(getattr(torch, TYPES[dtype])))
            with torch.no_grad():
                out = loaded.eval()(**_inputs(model, torch.from_numpy(tokens)), return_dict=True)
        except failures as error:
            raise CorruptError(
                f"{directory}: transformers {transformers.__version__} cannot compute it: {error}"
            ) from error
    words: Array = (out.prediction_logits if "prediction_logits" in out else out.logits)[0].numpy()
    return words, out.seq_relationship_logits[0].numpy() if "seq_relationship_logits" in out else None


def _class_name(directory: Path, model: Mapping[str, Any]) -> str:
    """The class of transformers for a directory: of its model type, with the head of the model."""
    kind = str(read_config(directory).get("model_type"))
    return "AutoModelForCausalLM" if kind in DECODERS else hf_config(model, "float32", None, kind)["architectures"][0]


def _inputs(model: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """The arguments of a model of transformers for token ids ``[2, T]``; token types alternate."""
    import torch

    first, second = tokens[:, None]
    inputs = {"input_ids": first}
    if model["family"] == "bert":
        # Both types occur, so that a lost or exchanged table of token types changes the logits.
        inputs["token_type_ids"] = torch.arange(first.shape[1])[None] % max(1, model.get("num_tokentypes", 0))
    if model.get("task_head") == "multichoice":
        inputs = {"input_ids": tokens[None], "token_type_ids": inputs["token_type_ids"].expand(2, -1)[None]}
    if model["family"] == "t5":
        inputs["decoder_input_ids"] = second
    return inputs


def dtype_argument(version: str) -> str:
    """The argument of ``from_pretrained`` for the weight type: ``dtype`` since transformers 4.56."""
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    return "dtype" if release >= (4, 56) else "torch_dtype"


def _refuse_unlike(directory: Path, found: Mapping[str, Any], kinds: Sequence[str]) -> None:
    for kind in kinds:
        if found[kind]:
            raise CorruptError(
                f"{directory}: transformers reports {kind}: {short_names(sorted(map(str, found[kind])))}"
            )


@contextmanager
def _suggest_option() -> Iterator[None]:
    """Add the remedy of ``convert`` to an error of transformers; ``verify`` has no such option."""
    try:
        yield
    except CorruptError as error:
        raise CorruptError(f"{error}; --no-check-logits converts without comparing") from error


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Silence transformers' warnings and progress bars: another release may have written the directory."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            logging.enable_progress_bar()
