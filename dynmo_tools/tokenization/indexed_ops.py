"""Operations on indexed datasets: merging without reading tokens, conversion between forms."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from .._common.document import sync_directory
from .._common.errors import DynmoError, UsageError
from ..config.settings import IndexForm
from ..formats.dataset import copy_pieces, encode_sidecar, read_sidecar, sidecar_path
from ..formats.indexed import CODES, Index, bin_path, encode_index, idx_path, read_index
from ..formats.int_columns import add_scalar, concatenate, drop_first, in_memory
from ..io.atomic_write import sweep_temporaries
from ..io.concat_files import append_files
from ..io.paths import check_new_outputs
from .provenance import common_tokenizer, earlier_steps, new_sidecar, pieces_of

BLOCK_TOKENS = 1 << 22  # 4 to 32 MiB, by the token type


def expand_prefixes(names: Sequence[str]) -> list[Path]:
    """Expand prefixes, ``.idx`` or ``.bin`` names, patterns of these, and folders to prefixes.

    A dataset that is named twice is returned twice, as in Megatron's merge; one pattern returns each dataset once.

    Raises:
        UsageError: a name matches no dataset.
    """
    import glob

    found: list[Path] = []
    for name in names:
        if os.path.isdir(name):
            paths = sorted(map(str, Path(name).glob("*.idx")))
        elif idx_path(Path(name)).exists():
            paths = [name]
        else:
            found_names = [name] if os.path.exists(name) else glob.glob(name)
            paths = sorted(path for path in found_names if path.endswith((".idx", ".bin")))
        if not paths:
            raise UsageError(
                f"{name}: no indexed dataset found; name a PREFIX of PREFIX.bin and PREFIX.idx, or a folder"
            )
        found += dict.fromkeys(Path(path.removesuffix(".idx").removesuffix(".bin")) for path in paths)
    return found


@contextlib.contextmanager
def _new_dataset(prefix: Path) -> Iterator[tuple[IO[bytes], IO[bytes], IO[bytes]]]:
    """Open ``.bin``, sidecar and ``.idx`` of a new dataset; renamed in this order, or deleted if the block fails.

    An empty sidecar is deleted, and so is an older one.

    Raises:
        DynmoError: the system refused.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    targets = (bin_path(prefix), sidecar_path(prefix), idx_path(prefix))
    for path in targets:
        sweep_temporaries(path)
    temporary = [path.with_name(f".{path.name}.tmp-{os.getpid()}") for path in targets]
    try:
        with contextlib.ExitStack() as stack:
            tokens, sidecar, index = (stack.enter_context(open(path, "wb")) for path in temporary)
            yield tokens, sidecar, index
            for handle in (tokens, sidecar, index):
                handle.flush()
                os.fsync(handle.fileno())
        for path in targets[1:]:
            path.unlink(missing_ok=True)  # new tokens must not have an old index or sidecar
        if not temporary[1].stat().st_size:
            temporary[1].unlink()
        # The index is the last one: a process that is killed before it leaves no output, and after it nothing else.
        for source, target in zip(temporary, targets, strict=True):
            if source.exists():
                os.replace(source, target)
        sync_directory(targets[0].parent)
    except OSError as error:
        raise DynmoError(
            f"{error.filename or prefix}: {error.strerror or error}; no output was kept; free disk space or fix the"
            " error, and run the same command again"
        ) from error
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _check_output(inputs: Sequence[Path], output: Path, *, overwrite: bool) -> None:
    """Refuse an output that is an input, cannot be written, or exists without ``overwrite``."""
    if output.resolve() in {path.resolve() for path in inputs}:
        raise UsageError(f"{output}: is both input and output; choose another output")
    check_new_outputs([], [bin_path(output), idx_path(output)], overwrite=overwrite)


def merged_index(indices: Sequence[Index], names: Sequence[Path], *, widen: bool) -> Index:
    """The index of concatenated datasets.

    Args:
        indices: their indices.
        names: their prefixes, for messages.
        widen: convert tokens to the widest type.

    Raises:
        UsageError: their forms differ, or their types differ and ``widen`` is not set.
    """
    forms = {index.form for index in indices}
    if len(forms) > 1:
        raise UsageError("the datasets have different forms; convert them to one form with convert-indexed")
    dtype = indices[0].dtype
    for index, name in zip(indices, names, strict=True):
        if index.dtype == dtype:
            continue
        if not widen:
            raise UsageError(
                f"{name}: tokens are {index.dtype.name}, those of {names[0]} are {dtype.name}; "
                "use --widen to convert all to the wider type"
            )
        dtype = np.promote_types(dtype, index.dtype)
        if {dtype, index.dtype} == {np.dtype(np.uint16), np.dtype(np.int32)}:
            dtype = np.dtype(np.int32)
    if dtype not in CODES:
        raise UsageError(f"{dtype.name}: not a token type of the format; convert the datasets first")
    if any((index.modes is None) != (indices[0].modes is None) for index in indices):
        raise UsageError("only some of the datasets are multimodal; merge them separately")
    # Document boundaries count sequences of the merged dataset: those before this one are added, its 0 is left out.
    before = np.cumsum([0, *(len(index.lengths) for index in indices)])
    documents = [add_scalar(drop_first(index.documents), int(at)) for index, at in zip(indices, before, strict=False)]
    modes = [index.modes for index in indices if index.modes is not None]
    return Index(
        form=indices[0].form,
        dtype=dtype,
        lengths=concatenate([index.lengths for index in indices]),
        documents=concatenate([in_memory([0]), *documents]),
        modes=concatenate(modes) if modes else None,
    )


def _cast_tokens(prefix: Path, index: Index, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """The tokens of a dataset converted to another type, in blocks.

    Raises:
        UsageError: an id exceeds the new type.
    """
    with open(bin_path(prefix), "rb") as source:
        while payload := source.read(BLOCK_TOKENS * index.dtype.itemsize):
            block = np.frombuffer(payload, dtype=index.dtype.newbyteorder("<"))
            if index.dtype.kind != "f" and len(block):
                limits = np.iinfo(dtype)
                if int(block.max()) > limits.max or int(block.min()) < limits.min:
                    raise UsageError(
                        f"{prefix}: the id {block.max()} is out of range of {dtype.name}; use a wider type"
                    )
            yield block.astype(dtype.newbyteorder("<")).tobytes()


def _write(prefixes: Sequence[Path], indices: Sequence[Index], new: Index, output: Path, step: dict[str, Any]) -> None:
    """Concatenate datasets to ``output`` with the index ``new``.

    The output has a sidecar if an input has one; inputs without a sidecar are then read for their checksums.
    """
    sidecars = [read_sidecar(prefix) for prefix in prefixes]
    has_sidecar = any(sidecar is not None for sidecar in sidecars)
    tokenizer, eod_id = common_tokenizer(prefixes, sidecars)
    with _new_dataset(output) as (tokens, sidecar, idx):
        sources = [pieces_of(*pair) for pair in zip(prefixes, sidecars, strict=True)] if has_sidecar else []
        # Without a cast, the bytes are copied and their checksums taken over: no token is read.
        if all(index.dtype == new.dtype for index in indices):
            append_files(tokens, [bin_path(prefix) for prefix in prefixes])
            pieces = [piece for source in sources for piece in source]
        else:
            casts = (_cast_tokens(*pair, new.dtype) for pair in zip(prefixes, indices, strict=True))
            pieces = [copy_pieces(cast, tokens) for cast in casts]
        written = copy_pieces(encode_index(new), idx)
        if has_sidecar:
            named = zip(prefixes, sources, strict=True)
            document = new_sidecar(
                tokenizer=tokenizer,
                eod_id=eod_id,
                inputs=[{"path": str(bin_path(prefix)), "pieces": source} for prefix, source in named],
                steps=[*(earlier_steps(sidecars[0]) if len(prefixes) == 1 else []), step],
                bin_pieces=pieces,
                idx=written,
            )
            sidecar.write(encode_sidecar(document))


def merge_datasets(prefixes: Sequence[Path], output: Path, *, widen: bool = False, overwrite: bool = False) -> Index:
    """Concatenate datasets.

    Args:
        prefixes: prefixes of the datasets, in order.
        output: prefix of the new dataset.
        widen: convert tokens to the widest type.
        overwrite: replace an existing output.

    Returns:
        The new index.

    Raises:
        UsageError: see ``merged_index``; an input is invalid; or two inputs have different vocabularies.
    """
    _check_output(prefixes, output, overwrite=overwrite)
    indices = [read_index(prefix) for prefix in prefixes]
    merged = merged_index(indices, prefixes, widen=widen)
    _write(prefixes, indices, merged, output, {"step": "merge-indexed", "settings": {"widen": widen}})
    return merged


def convert_dataset(
    prefix: Path, output: Path, form: IndexForm, dtype: np.dtype[Any] | None, *, overwrite: bool = False
) -> Index:
    """Convert a dataset to another form or token type.

    Args:
        prefix: prefix of the dataset.
        output: prefix of the new dataset.
        form: form of the new index; tokens of ``cached`` and ``lazy`` are int32 by default.
        dtype: type of the new tokens; None keeps the type that the form allows.
        overwrite: replace an existing output.

    Returns:
        The new index.

    Raises:
        UsageError: an id exceeds the new type, or the form does not support modes.
    """
    _check_output([prefix], output, overwrite=overwrite)
    index = read_index(prefix)
    if form is not IndexForm.MMAP and index.modes is not None:
        raise UsageError(f"{prefix}: is multimodal, which requires the form mmap; use --to mmap")
    wide = np.dtype(np.int32) if form is not IndexForm.MMAP and index.dtype == np.dtype(np.uint16) else index.dtype
    converted = Index(
        form="mmap" if form is IndexForm.MMAP else "tnt",
        dtype=dtype or wide,
        lengths=index.lengths,
        documents=index.documents,
        modes=index.modes,
    )
    settings = {"to": form.value, "dtype": converted.dtype.name}
    _write([prefix], [index], converted, output, {"step": "convert-indexed", "settings": settings})
    return converted
