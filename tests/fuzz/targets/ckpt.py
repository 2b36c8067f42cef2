"""Parsers of ``dynmo_ckpt``: manifests, safetensors, pickles, checkpoints of other programs, tokenizer files.

The project reads no GGUF: such a file is refused by its name.
"""

# Seeds are lines as other programs write them.
from __future__ import annotations

import argparse
import io
import json
import shutil
import struct
import sys
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target, bytes_target, file_target, text_target
from tests.fuzz.targets.common import (
    click_command,
    command_target,
    document_targets,
    folder_target,
    pack_header,
    pack_pickle,
    repacked,
    resealed,
    unpack_header,
    unpack_pickle,
)
from tests.paths import ROOT, extract

P = "dynmo_ckpt"
HELPERS = ROOT / "tests" / "unit" / "dynmo_ckpt"
DEEPSPEED = HELPERS / "converters" / "fixtures" / "deepspeed"


def _helper(name: str) -> Any:
    """A module of the helpers of the unit tests, whose folder has no package."""
    from importlib import import_module

    for folder in (HELPERS, HELPERS / "megatron", HELPERS / "converters"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def _native(place: Path) -> None:
    native = _helper("native_checkpoints")
    m = native.model(num_layers=1)
    p = native.parameters(m)
    native.save(place, {**p, **native.optimizer_state(p), **native.masks(p)}, m, files={"tokenizer/vocab.txt": b"x"})


def _safetensors(_folder: Path) -> list[bytes]:
    import numpy as np
    from safetensors.numpy import save

    return [
        save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int64)}),
        save({"a": np.zeros((2, 3), np.float16)}, {"format": "pt"}),
        save({}),
    ]


def _pickles(_folder: Path) -> list[bytes]:
    import argparse
    import pickle

    values: list[Any] = [
        {"a": [1, 2.5, "x", None, True, (1, 2, (3,))], "b": {1: b"bytes", "c": {1, 2}}, "d": 1 << 70},
        argparse.Namespace(num_layers=2, hidden_size=64, path=Path("x")),
        [frozenset({1}), (1,) * 20, {"k": (1, {"x": ()})}],
    ]
    return [pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4)]


def _torch_files(_folder: Path) -> list[bytes]:
    import torch

    tree = {
        "model": {"a": torch.zeros(2, 3), "b": torch.ones(4).half().t()},
        "step": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "list": [1, 2],
    }
    found = []
    for is_zip in (True, False):
        buffer = io.BytesIO()
        torch.save(tree, buffer, _use_new_zipfile_serialization=is_zip)
        found.append(buffer.getvalue())
    return found


def _open_torch(read: Any, path: Path) -> None:
    from dynmo_ckpt.torch_save.pickles import TensorRef

    file = read(path)

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, TensorRef):
            file.tensor(value, "x")
            file.number(value)
        elif isinstance(value, dict) and depth < 5:
            for member in value.values():
                visit(member, depth + 1)

    visit(file.tree, 0)


def _converted(place: Path, module: str, attribute: str, *, with_optimizer: bool = False) -> None:
    """A native checkpoint, converted to another format by this project."""
    from importlib import import_module

    from dynmo_ckpt._common.console import Format
    from dynmo_ckpt.converters.registry import open_checkpoint
    from dynmo_ckpt.formats.choices import WriteOptions
    from dynmo_ckpt.operations.write import WriteSettings, write_export

    source = place.with_name("native")
    _native(source)
    plan = getattr(import_module(module), attribute).write(
        open_checkpoint(source)[0], WriteOptions(with_optimizer=with_optimizer)
    )
    settings = WriteSettings(jobs=1, verify=False, overwrite=True, plan_only=False, format=Format.TEXT)
    write_export(source, place, plan, settings)
    shutil.rmtree(source)


def _hugging_face(place: Path) -> None:
    _converted(place, f"{P}.converters.huggingface", "HUGGING_FACE")
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    (place / "tokenizer.json").write_text(json.dumps({**vocabulary, "added_tokens": [{"id": 2, "content": "</s>"}]}))
    (place / "generation_config.json").write_text('{"eos_token_id": 1}')


def _adapter(place: Path) -> None:
    """A directory with a model, one matrix of which is in float8, and an adapter."""
    import torch
    from safetensors.torch import load_file, save_file

    _hugging_face(place)
    tensors = load_file(place / "model.safetensors")
    name = next(name for name in tensors if name.endswith("attn.c_attn.weight"))
    inner, outer = tensors[name].shape
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(())
    save_file(tensors, place / "model.safetensors")
    config = json.loads((place / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": None}
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    module = f"base_model.model.{name.removesuffix('.weight')}"
    pair = {f"{module}.lora_A.weight": torch.ones(2, inner), f"{module}.lora_B.weight": torch.ones(outer, 2)}
    save_file(pair, place / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"c_a.*": 2}}
    (place / "adapter_config.json").write_text(json.dumps(settings))


def _sparse(place: Path) -> None:
    """A directory with a model, matrices of which are in sparse-bitmask."""
    import numpy as np
    import torch
    from safetensors.torch import load_file, save_file

    _hugging_face(place)
    tensors = load_file(place / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("attn.c_attn.weight", "mlp.c_fc.weight"))]:
        module, weight = name.removesuffix(".weight"), tensors.pop(name)
        weight[:, ::2] = 0
        stored = weight != 0
        counts = stored.sum(1)
        tensors[f"{module}.shape"] = torch.tensor(weight.shape)
        tensors[f"{module}.compressed"] = weight[stored]
        tensors[f"{module}.bitmask"] = torch.from_numpy(np.packbits(stored.numpy(), axis=1, bitorder="little"))
        tensors[f"{module}.row_offsets"] = counts.cumsum(0) - counts
    save_file(tensors, place / "model.safetensors")
    config = json.loads((place / "config.json").read_text())
    method = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


def _open_computed(read: Any, place: Path) -> None:
    """The weights of a model, computed and read."""
    from dynmo_ckpt.formats.choices import ReadOptions
    from dynmo_ckpt.operations.reference_model import load_array

    checkpoint, _ = read(place, ReadOptions())
    for name in checkpoint.weights():
        load_array(checkpoint, name)


def _open_adapter(read: Any, place: Path) -> None:
    """The weights of a model with an adapter: dequantized, merged and read."""
    from dynmo_ckpt.formats.choices import ReadOptions
    from dynmo_ckpt.operations.reference_model import load_array

    checkpoint, _ = read(place, ReadOptions(adapters=(place,)))
    for name in checkpoint.weights():
        load_array(checkpoint, name)


def _sharded(place: Path) -> None:
    """A Hugging Face directory with an index of its weights."""
    _hugging_face(place)
    from dynmo_ckpt.io.safetensors import read_index

    weights = {name: "model-1.safetensors" for name in read_index(place / "model.safetensors").arrays}
    (place / "model.safetensors").rename(place / "model-1.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _byte_level(place: Path) -> None:
    """A tokenizer that a GGUF file can have."""
    place.mkdir()
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    rules = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    document = {"model": model, "pre_tokenizer": rules, "added_tokens": [{"id": 3, "content": "</s>", "special": True}]}
    (place / "tokenizer.json").write_text(json.dumps(document))


def _vocabulary(place: Path) -> None:
    """A Hugging Face directory with GPT-2's two files in place of a ``tokenizer.json``."""
    _hugging_face(place)
    (place / "tokenizer.json").unlink()
    (place / "vocab.json").write_text('{"a": 0, "</s>": 1}')


def _open(read: Any, place: Path) -> None:
    read(place)


def _open_with_optimizer(read: Any, place: Path) -> None:
    from dynmo_ckpt.formats.choices import ReadOptions

    read(place, options=ReadOptions(with_optimizer=True, num_attention_heads=4))


def _legacy(place: Path) -> None:
    _converted(place, f"{P}.converters.legacy_megatron", "LEGACY_MEGATRON", with_optimizer=True)


def _dcp(place: Path) -> None:
    native = _helper("native_checkpoints")
    dcp = _helper("test_torch_dcp")
    m = native.model(num_layers=1)
    dcp.save(place, dcp.core(m, native.parameters(m)), {"args": dcp.arguments(m), "iteration": 1})


def _dcp_decoder(place: Path) -> None:
    """A distributed checkpoint of a decoder with experts, whose model is described by more arguments."""
    decoder = _helper("test_core_decoder")
    args = argparse.Namespace(**decoder.ARGS, window_size=(3, 0), window_attn_skip_freq=2)
    _helper("test_torch_dcp").save(place, decoder.state(), {"args": args, "iteration": 1})


def _core_ranks(place: Path) -> None:
    """The same decoder in a file of one rank, its experts in one matrix."""
    _helper("test_core_ranks").save_ranks(place, _helper("test_core_decoder").state(), form="together")


def _dcp_decoder_flat(place: Path) -> None:
    """The same decoder with flat optimizer buckets, those of its experts apart."""
    decoder, optimizer = _helper("test_core_decoder"), _helper("test_core_optimizer")
    tensors = decoder.state()
    flat = optimizer.buckets(tensors, stages=1, experts=decoder.EXPERTS, fused=True, grouped=True)
    args = argparse.Namespace(**decoder.ARGS, expert_model_parallel_size=decoder.EXPERTS)
    common = {"args": args, "iteration": 1, "optimizer": optimizer.groups()}
    _helper("test_torch_dcp").save(place, optimizer.half(tensors) | flat, common)


def _dcp_flat(place: Path) -> None:
    """A distributed checkpoint with flat optimizer buckets."""
    native = _helper("native_checkpoints")
    m = native.model(num_layers=1)
    _helper("test_torch_dcp").flat_checkpoint(place, m, native.parameters(m))


def _titan_tensors(config: dict[str, Any]) -> dict[str, Any]:
    """Tensors of zeros under torchtitan's names."""
    import numpy as np

    from dynmo_ckpt.converters.titan_models import titan_model
    from dynmo_ckpt.huggingface.models import hf_model
    from dynmo_ckpt.maps.axes import stored_shape
    from dynmo_ckpt.maps.name_map import layout_of, load_map

    model = hf_model(config, 1)
    found = titan_model(model)
    layout = layout_of(load_map(found.map, found.variant), model)
    sizes, shapes = layout.foreign_sizes, {}
    for link in layout.links:
        own = {link.native_part[0]: sizes[link.native_part[1]]} if link.native_part and not link.foreign_part else {}
        shapes[link.foreign] = stored_shape(link.foreign_axes, {**sizes, **own})
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


_TITAN: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2}
_TITAN |= {"num_key_value_heads": 2, "max_position_embeddings": 8, "rope_theta": 1e4}


def _titan(place: Path) -> None:
    """A DeepSeek."""
    config = {**_TITAN, "model_type": "deepseek_v3", "num_hidden_layers": 2, "moe_intermediate_size": 4}
    config |= {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config |= {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    config |= {"first_k_dense_replace": 1}
    _helper("test_torch_dcp").save(place, _titan_tensors(config))
    (place / "config.json").write_text(json.dumps(config))


def _titan_optimizer(place: Path) -> None:
    """A Llama with Adam's state, whose settings are objects in the files."""
    import torch
    from torch.distributed import checkpoint as dcp

    config = {**_TITAN, "model_type": "llama", "num_hidden_layers": 1}
    tensors = {name: torch.from_numpy(array) for name, array in _titan_tensors(config).items()}
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True, "amsgrad": False}
    state: dict[str, Any] = {"train_state.step": 3, "lr_scheduler.last_epoch": 3}
    for name, tensor in tensors.items():
        state |= {f"optimizer.state.{name}.{kind}": tensor for kind in ("exp_avg", "exp_avg_sq")}
        state[f"optimizer.state.{name}.step"] = torch.tensor(3.0)
        state |= {f"optimizer.param_groups.{name}.{key}": value for key, value in settings.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves in a single process
        dcp.save(tensors | state, checkpoint_id=place)
    (place / "config.json").write_text(json.dumps(config))


def _deepspeed(name: str) -> Callable[[Path], None]:
    def build(place: Path) -> None:
        with tarfile.open(DEEPSPEED / f"{name}.tar.xz") as archive:
            extract(archive, place)

    return build


def _deepspeed_targets() -> list[Target]:
    found: list[Target] = []
    for name in ("zero1-fp16", "zero3-fp32", "zero1-bf16-pipeline"):
        with tarfile.open(DEEPSPEED / f"{name}.tar.xz") as archive:
            files = {member.name: member.size for member in archive.getmembers() if member.isfile()}
        chosen = [file for file in sorted(files) if file.endswith((".pt", "latest"))]
        found.extend(
            folder_target(
                f"{P}.converters.registry:open_checkpoint",
                _deepspeed(name),
                file=file,
                label=f"deepspeed-{name}-{Path(file).stem}",
                call=_open_with_optimizer,
                more_readers=(
                    f"{P}.converters.deepspeed:open_deepspeed",
                    f"{P}.converters.deepspeed:read_transformers",
                    f"{P}.converters.zero:read_zero",
                ),
            )
            for file in chosen[:1] + chosen[-1:]
        )
    return found


def _llama2c(_folder: Path) -> list[bytes]:
    sizes = (8, 16, 1, 2, 2, 10, 4)
    numbers = 10 * 8 + 8 + 64 * 4 + 8 + 3 * 128 + 8 + 4 * 4
    return [struct.pack("<7i", *sizes) + bytes(4 * count) for count in (numbers,)]


def _tokenizer_files(read: Any, place: Path) -> None:
    read(place, 100, 64)


def _manifest(_folder: Path) -> list[bytes]:
    _native(_folder / "c")
    return [(_folder / "c" / "manifest.json").read_bytes()]


OPTIONS = {
    "convert": "RUN out --to hf --dtype bf16 --max-shard-size 5GB --jobs 2",
    "reshard": "RUN out --tp 2 --pp 2",
    "info": "RUN --format json",
    "merge": "RUN out",
    "average": "RUN RUN --output out --weights 1,2 --tp 2",
}
_MANIFEST = bytes_target(f"{P}.formats.checkpoint:parse_manifest", _manifest, call=lambda parse, data: parse(data, "m"))


def _legacy_target(label: str, call: Callable[[Any, Path], None]) -> Target:
    return folder_target(
        f"{P}.converters.registry:open_checkpoint",
        _legacy,
        file="iter_0000008/mp_rank_00/model_optim_rng.pt",
        label=label,
        call=call,
        more_readers=(f"{P}.megatron.read:open_legacy", f"{P}.megatron.arguments:read_args"),
    )


_DCP_COMMON = folder_target(f"{P}.converters.registry:open_checkpoint", _dcp, file="common.pt", label="dcp-common")
TARGETS = [
    *document_targets(P),
    file_target(
        f"{P}.native.checkpoint:read_latest",
        lambda _: [b"step-00000008\n"],
        file="LATEST",
        call=lambda read, path: read(path.parent),
    ),
    _MANIFEST,
    resealed(_MANIFEST),
    file_target(f"{P}.io.safetensors:read_index", _safetensors, file="model.safetensors"),
    bytes_target(f"{P}.torch_save.pickles:load_pickle", _pickles, call=lambda parse, data: parse(data, "x")),
    bytes_target(
        f"{P}.torch_save.pickles:load_stream", _pickles, call=lambda parse, data: parse(io.BytesIO(data), "x")
    ),
    file_target(f"{P}.torch_save.reader:open_torch", _torch_files, file="model.pt", call=_open_torch),
    resealed(
        folder_target(
            f"{P}.converters.registry:open_checkpoint",
            _native,
            file="manifest.json",
            label="native-manifest",
            more_readers=(f"{P}.converters.native:read_native", f"{P}.native.checkpoint:open_native"),
        )
    ),
    folder_target(
        f"{P}.converters.registry:open_checkpoint", _native, file="model-p000-t00.safetensors", label="native-shard"
    ),
    *(
        folder_target(
            f"{P}.converters.registry:open_checkpoint",
            _hugging_face,
            file=file,
            label=f"hf-{label}",
            more_readers=(f"{P}.converters.huggingface:read_hf",),
        )
        for label, file in (("config", "config.json"), ("weights", "model.safetensors"))
    ),
    *(
        folder_target(
            f"{P}.converters.huggingface:read_hf",
            _adapter,
            file=file,
            label=f"computed-{label}",
            call=_open_adapter,
            more_readers=(f"{P}.huggingface.adapters:read_adapter",),
        )
        for label, file in (
            ("adapter-config", "adapter_config.json"),
            ("adapter", "adapter_model.safetensors"),
            ("quantized", "model.safetensors"),
            ("config", "config.json"),
        )
    ),
    *(
        folder_target(
            f"{P}.converters.huggingface:read_hf", _sparse, file=file, label=f"sparse-{label}", call=_open_computed
        )
        for label, file in (("weights", "model.safetensors"), ("config", "config.json"))
    ),
    folder_target(f"{P}.huggingface.files:read_tensors", _sharded, file="model.safetensors.index.json", label="index"),
    folder_target(f"{P}.huggingface.files:read_config", _hugging_face, file="config.json", label="json"),
    folder_target(
        f"{P}.huggingface.files:read_generation_config", _hugging_face, file="generation_config.json", label="json"
    ),
    folder_target(
        f"{P}.huggingface.tokenizer:copied_tokenizer",
        _hugging_face,
        file="tokenizer.json",
        label="tokenizer",
        call=_tokenizer_files,
    ),
    folder_target(
        f"{P}.converters.gguf_tokenizer:tokenizer_keys",
        _byte_level,
        file="tokenizer.json",
        label="tokenizer",
        call=lambda read, place: read(place, 64, []),
    ),
    folder_target(
        f"{P}.huggingface.tokenizer:copied_tokenizer",
        _vocabulary,
        file="vocab.json",
        label="vocabulary",
        call=_tokenizer_files,
    ),
    _legacy_target("legacy", _open),
    _legacy_target("legacy-optimizer", _open_with_optimizer),
    folder_target(
        f"{P}.converters.registry:open_checkpoint",
        _core_ranks,
        file="iter_0000005/mp_rank_00/model_optim_rng.pt",
        label="core-ranks",
    ),
    folder_target(
        f"{P}.converters.registry:open_checkpoint",
        _legacy,
        file="latest_checkpointed_iteration.txt",
        label="legacy-tracker",
    ),
    *(
        folder_target(
            f"{P}.converters.registry:open_checkpoint",
            _dcp,
            file=file,
            label=f"dcp-{label}",
            more_readers=(f"{P}.converters.torch_dcp:read_dcp", f"{P}.converters.torch_dcp:open_dcp"),
        )
        for label, file in (("metadata", ".metadata"), ("tensors", "__0_0.distcp"))
    ),
    _DCP_COMMON,
    folder_target(f"{P}.converters.registry:open_checkpoint", _dcp_decoder, file="common.pt", label="dcp-decoder"),
    *(
        folder_target(f"{P}.converters.registry:open_checkpoint", _titan, file=file, label=f"titan-{label}")
        for label, file in (("metadata", ".metadata"), ("json", "config.json"))
    ),
    *(
        folder_target(
            f"{P}.converters.registry:open_checkpoint",
            _titan_optimizer,
            file=file,
            label=f"titan-optimizer-{label}",
            call=_open_with_optimizer,
        )
        for label, file in (("metadata", ".metadata"), ("data", "__0_0.distcp"))
    ),
    *(
        folder_target(
            f"{P}.converters.registry:open_checkpoint",
            build,
            file=file,
            label=f"dcp-flat-{name}{label}",
            call=_open_with_optimizer,
        )
        for name, build in (("", _dcp_flat), ("decoder-", _dcp_decoder_flat))
        for label, file in (("metadata", ".metadata"), ("common", "common.pt"))
    ),
    *_deepspeed_targets(),
    *(
        repacked(target, pack_pickle, unpack_pickle)
        for target in (
            file_target(f"{P}.torch_save.reader:open_torch", _torch_files, file="model.pt", call=_open_torch),
            _legacy_target("legacy-optimizer", _open_with_optimizer),
            _DCP_COMMON,
            *(target for target in _deepspeed_targets() if not target.name.endswith("latest")),
        )
    ),
    repacked(
        file_target(f"{P}.io.safetensors:read_index", _safetensors, file="model.safetensors"),
        pack_header,
        unpack_header,
    ),
    file_target(
        f"{P}.converters.llama2c:read_llama2c", _llama2c, file="model.bin", call=lambda read, path: read(path, 1)
    ),
    file_target(f"{P}.cli.megatron_tools:_vocabulary", lambda _folder: [b'{"a": 0, "b": 1}'], file="vocab.json"),
    *(
        text_target(f"{P}.io.{parser}", ["s3://bucket/run/step-00000004", "hf://account/model@main", "gs://b", "run/x"])
        for parser in ("urls:parse_url", "remote:parse_location")
    ),
    file_target(f"{P}.io.files:read_tracker", lambda _folder: [b"step-00000008\n", b"release"], file="LATEST"),
    text_target(f"{P}.cli.options:parse_bytes", ["5GB", "1.5MB", "1024"]),
    text_target(
        f"{P}.cli.options:parse_numbers", ["1,2", "0.5,1e3,nan"], call=lambda parse, text: parse("--weights", text)
    ),
    text_target(f"{P}.maps.axes:parse_axes", ["[3 h d] w", "h (3 d) -> d", "a b"], errors=(ValueError,)),
    *(command_target(P, click_command(f"{P}.cli", "app", name), name, [line]) for name, line in OPTIONS.items()),
]
