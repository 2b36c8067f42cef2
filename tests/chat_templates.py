"""Chat templates in the manner of published ones, with ``{% generation %}`` blocks and without, and conversations."""

from __future__ import annotations

import json
import re

SPECIAL = (
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<|begin|>",
    "<|header|>",
    "<|end_header|>",
    "<|eot|>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "<bos>",
    "<turn>",
    "<end_turn>",
    "<|pad|>",
)
HEADERS = (
    "{{- bos_token }}"
    "{%- if tools %}{{- '<|header|>tools<|end_header|>\n\n' }}{% for tool in tools %}"
    "{{ tool | tojson(indent=2) + '\n' }}{% endfor %}{{ '<|eot|>' }}{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|header|>' + message.role + '<|end_header|>\n\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{- message.content | trim + '<|eot|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content | trim + '<|eot|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\n\n' }}{%- endif %}"
)
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% set ns = namespace(system='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\n\n' %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + ns.system + message.content + ' [/INST]' }}{% set ns.system = '' %}"
    "{% elif message.role == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% elif message.role != 'system' %}"
    "{{ raise_exception('roles are user and assistant, not ' + message.role) }}{% endif %}"
    "{% endfor %}"
)
_ROLES = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set name = 'model' if message.role == 'assistant' else message.role %}"
)
_TURN = (
    "{{ '<turn>' + name + '\n' }}"
    "{% if name == 'model' %}{% generation %}{{ text | trim }}{{ '<end_turn>' }}{% endgeneration %}"
    "{% else %}{{ text | trim }}{{ '<end_turn>' }}{% endif %}{{ '\n' }}"
)
_PROMPT = "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
TURNS = f"{_ROLES}{{% set text = message.content %}}{_TURN}{_PROMPT}"
MACRO = f"{{% macro turn(name, text) %}}{_TURN}{{% endmacro %}}{_ROLES}{{{{ turn(name, message.content) }}}}{_PROMPT}"
"""The same text as ``TURNS``, by a macro."""
TEMPLATES = {"llama-3-like": HEADERS, "chatml": CHATML, "mistral-like": INSTRUCTIONS, "gemma-like": TURNS}
TOKENS = {
    "llama-3-like": ("<|begin|>", "<|eot|>"),
    "chatml": ("<|endoftext|>", "<|im_end|>"),
    "mistral-like": ("<s>", "</s>"),
    "gemma-like": ("<bos>", "<end_turn>"),
}
USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": '  It is 4 — très simple, <b>4</b> & "quoted".\n'}
CONVERSATIONS = (
    [USER, ANSWER],
    [USER, ANSWER, {"role": "user", "content": "日本語?"}, {"role": "assistant", "content": "はい 😀\n\nprint(1)"}],
    [{"role": "system", "content": "Terse."}, USER, ANSWER],
    [{"role": "system", "content": "Terse."}, USER, ANSWER, USER, {"role": "assistant", "content": "4"}],
    [USER, ANSWER, USER],
)


def without_blocks(template):
    """The template as it is published most often: without generation blocks."""
    return re.sub(r"{% (end)?generation %}", "", template)


def write_tokenizer(folder, name, template, *, file=True):
    """A directory of a model's tokenizer: byte-level BPE, with the template in a file or in the configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for messages in CONVERSATIONS for message in messages]
    tokenizer.train_from_iterator([*texts, "user\n assistant\n model\n system\n Be helpful.\n"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = TOKENS[name]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": bos, "special": True},
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    if file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
