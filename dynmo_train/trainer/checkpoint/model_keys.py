"""Keys of a manifest's model that are compared in another way than the rest, where a run loads a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def remedy_of(key: str, stored: Mapping[str, Any]) -> str:
    """How to train the model of a checkpoint where a key differs and one option decides, as the end of a message.

    Args:
        key: key of a manifest's model.
        stored: the model of the checkpoint.
    """
    return f" (--activation {stored[key]} trains the model of the checkpoint)" if key == "activation" else ""
