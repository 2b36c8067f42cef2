"""Keys of a manifest's model that are compared in another way than the rest, where a run loads a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ...config import Config

# Keys that record how the run was set up and may differ: the padding of the vocabulary.
RECORDS = frozenset({"padded_vocab_size"})
# Keys that affect the training of experts and not their output, and their options: another run may change them.
TRAINING_KEYS: Mapping[str, str] = {
    "moe_aux_loss_coeff": "--moe-aux-loss-coeff",
    "moe_seq_aux_loss_coeff": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff",
    "moe_global_aux_loss_coeff": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff",
    "moe_z_loss_coeff": "--moe-z-loss-coeff",
    "moe_capacity_factor": "--moe-expert-capacity-factor",
    "moe_eval_capacity_factor": "--moe-eval-capacity-factor",
    "moe_min_capacity": "--moe-min-capacity",
    "moe_token_drop_policy": "--moe-token-drop-policy",
}
# Keys that earlier versions did not write, and the values that those used.
FORMER_VALUES = {
    "moe_eval_capacity_factor": None,
    "moe_min_capacity": 0,
    "moe_token_drop_policy": "probs",
    "moe_seq_aux_loss_coeff": 0.0,
    "moe_global_aux_loss_coeff": 0.0,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": False,
}


# Position embeddings without weights: a longer sequence, or another rotation, is the same weights.
WITHOUT_WEIGHTS = ("rotary", "relative")
# Keys of the rotation, and the options of which one must be given for another one.
ROTATION_KEYS: Mapping[str, Collection[str]] = {
    "rotary_base": ("rotary_base",),
    "local_rotary_base": ("local_rotary_base",),
    "rotary_scaling": (
        *("rotary_scaling", "use_rope_scaling", "rope_scaling_factor", "rope_type", "rotary_scaling_factor", "mscale"),
        *("mscale_all_dim", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    ),
}


def keys_of_extension(config: Config, stored: Mapping[str, Any]) -> frozenset[str]:
    """Keys of a manifest's model that a run may change to extend the context of a checkpoint.

    Positions without weights allow a greater length; with a smaller one the model would lose what it can. A rotation
    that only the default of an option changes is a forgotten option; one that is given is a stage of the training, such
    as YaRN (Peng et al. 2023, arXiv:2309.00071).

    Args:
        config: configuration of the run.
        stored: the model of the checkpoint.
    """
    if stored.get("position_embedding") not in WITHOUT_WEIGHTS:
        return frozenset()
    is_longer = config.model.max_position_embeddings > stored["max_position_embeddings"]
    given = {name for name, source in config.sources.items() if source in ("flag", "file")}
    changed = (key for key, options in ROTATION_KEYS.items() if given & set(options))
    return frozenset({*changed, *(("max_position_embeddings",) if is_longer else ())})


def extension_text(stored: Mapping[str, Any], expected: Mapping[str, Any], keys: Collection[str]) -> str:
    """The values of :func:`keys_of_extension` that a run changes, for the user; empty where it changes none.

    Args:
        stored: the model of the checkpoint.
        expected: that of the run.
        keys: keys that may differ.
    """
    changed = [key for key in sorted(keys) if stored.get(key) != expected.get(key)]
    return "; ".join(f"{key} is {stored.get(key)} there and {expected.get(key)} here" for key in changed)


def remedy_of(key: str, stored: Mapping[str, Any]) -> str:
    """How to train the model of a checkpoint where a key differs and one option decides, as the end of a message.

    Args:
        key: key of a manifest's model.
        stored: the model of the checkpoint.
    """
    if key == "activation":
        return f" (--activation {stored[key]} trains the model of the checkpoint)"
    if key in TRAINING_KEYS and stored.get(key):
        return f" ({TRAINING_KEYS[key]} {stored[key]} continues the training, --finetune takes the weights only)"
    if key == "max_position_embeddings" and stored.get("position_embedding") in WITHOUT_WEIGHTS:
        return f" (--max-position-embeddings {stored[key]} trains the model of the checkpoint, on any shorter samples)"
    if key == "rotary_scaling" and stored.get(key) is not None:
        return f" (--rotary-scaling '{json.dumps(stored[key])}' trains the model of the checkpoint)"
    return ""
