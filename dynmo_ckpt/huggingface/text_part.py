"""The text part of a model of images and text: its configuration, and its tensors among all of them. Pure.

``with_images`` of ``maps/config_keys.json`` has these models: ``model_type`` -> ``model_type`` of the text part. Their
configuration has that of the text in ``text_config``, or in releases before it among its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..io.errors import CorruptError, short_names
from ..tensors.views import Tensor
from .config_keys import key_table

Config = Mapping[str, Any]
# Of all models; a text part alone has no use for them.
IMAGE_PARTS = ("vision_tower", "visual", "vision_model", "multi_modal_projector")
TEXT_PARTS = ("model.language_model.", "language_model.model.", "model.text_model.")
IMAGE_KEYS = ("text_config", "vision_config", "image_", "video_", "vision_", "boi_", "eoi_", "mm_", "projector_")
# Positions of text are equal in all of their sections.
SECTIONS = ("mrope_section", "mrope_interleaved")


def has_images(config: Config) -> bool:
    """Whether a configuration is that of a model of images and text."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in key_table()["with_images"]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text part; a configuration without images as it is.

    Args:
        config: the contents of a ``config.json``.

    Raises:
        CorruptError: ``text_config`` is not an object.
    """
    if not has_images(config):
        return config
    kind = key_table()["with_images"][config["model_type"]]
    own = {key: value for key, value in config.items() if not key.startswith(IMAGE_KEYS)}
    text = config.get("text_config", {})
    if not isinstance(text, dict):
        raise CorruptError("config.json: text_config must be an object")
    # The text of a few models is one of several architectures.
    stated = text.get("model_type")
    is_known = isinstance(stated, str) and (stated in key_table()["model_types"] or stated in key_table()["refused"])
    known = stated if is_known else kind
    of_all = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "transformers_version")
    shared = {key: value for key, value in own.items() if key in of_all or key.endswith("_token_id")}
    found = ({**text, **shared} if text else own) | {"model_type": known}
    found.pop("architectures", None)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), dict):
            rope = {key: value for key, value in found[name].items() if key not in SECTIONS}
            found[name] = {key: "default" if value == "mrope" else value for key, value in rope.items()}
    return found


def text_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The tensors of the text part under the names of a model of text alone, and a remark about the others.

    Args:
        tensors: of a model of images and text, by name, of any shape.
    """
    found: dict[str, Tensor] = {}
    others = []
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(IMAGE_PARTS):
            others.append(name)
            continue
        part = next((part for part in TEXT_PARTS if name.startswith(part)), None)
        found[name.removeprefix("language_model.") if part is None else f"model.{name.removeprefix(part)}"] = tensor
    count = f"{len(others)} tensors of images are left out"
    return found, f"the text part alone: {count}{', such as ' + short_names(others[:1]) if others else ''}"


def is_head(name: str) -> bool:
    """Whether a tensor is the output layer, by its name in any of these models."""
    return name.endswith("lm_head.weight")
