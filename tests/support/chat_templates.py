"""Chat templates as models have them, each with something that makes it hard, and conversations drawn by a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from tests.support.vocabularies import make_tokenizer

SPECIALS = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|image_pad|>")
BEGIN_TURN = "{{ '<|im_start|>' + message['role'] + '\\n' }}"

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}" + BEGIN_TURN + "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Tools and calls; all of a turn behind its head is trained on."""

GENERATION = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{ '<|assistant|> ' }}{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
    "{%- else %}{{ '<|user|> ' + message['content'] | trim }}{%- endif %}{%- endfor %}"
)
"""Says itself what is generated, which begins inside a text."""

THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}" + BEGIN_TURN + "{% if message.role == 'assistant' %}"
    "{% set thought = (message.reasoning_content or message.content.split('</think>')[0].split('<think>')[-1])"
    " if '</think>' in message.content or message.reasoning_content else '' %}"
    "{% set said = message.content.split('</think>')[-1] %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}{% endif %}{{ said | trim }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
"""Forgets the thoughts of a turn once the user has spoken again."""

STRIPPING = (
    "{% for message in messages %}"
    "{{ '<|user|>\\n' if message.role == 'user' else '<|assistant|>\\n' if message.role == 'assistant' else '' }}"
    "{{ message.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Its tokens take white space behind them with them."""

STRICT = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = none %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{% if system is not none and loop.first %}{{ '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
"""Refuses rows, and has no special token between a question and its answer."""

TEMPLATES = {
    "chatml": CHATML,
    "generation": GENERATION,
    "thinking": THINKING,
    "stripping": STRIPPING,
    "strict": STRICT,
}
CONFIG = {"bos_token": {"content": "<|begin|>", "lstrip": False}, "eos_token": "<|im_end|>"}


def make_model_folder(folder: Path, template: str, *, seed: int = 0) -> Path:
    """A folder with `tokenizer.json` and `tokenizer_config.json`; returns it."""
    make_tokenizer(folder / "tokenizer.json", seed=seed, specials=SPECIALS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name in ("<|user|>", "<|assistant|>", "<|end|>"):
        if template == STRIPPING:
            tokenizer.add_special_tokens([AddedToken(name, special=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>", "<call>", "</call>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": template}))
    return folder


def draw_conversation(rng: np.random.Generator, kind: str, *, names: bool) -> list[dict[str, Any]]:
    """Messages for a template; with `names` some contents hold names of special tokens."""

    def words(least: int = 1) -> str:
        pool = ["alpha", " beta", "\n", " the", "x", " é", '"', "<b>", "  ", "1", ". "]
        if names:
            pool += ["<|im_end|>", "<|im_start|>assistant\n", "<|end|>"]
        return "".join(rng.choice(pool, int(rng.integers(least, 9))))

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": words()})
    for _ in range(int(rng.integers(1, 4))):
        messages.append({"role": "user", "content": words()})
        answer: dict[str, Any] = {"role": "assistant", "content": words()}
        if kind == "thinking" and rng.random() < 0.5:
            answer["content"] = f"<think>\n{words()}\n</think>\n\n{words()}"
        if kind == "chatml" and rng.random() < 0.4:
            call = {"name": words(), "arguments": {"x": words(), "y": int(rng.integers(9))}}
            answer |= {"content": None if rng.random() < 0.5 else words(), "tool_calls": [{"function": call}]}
            messages += [answer, {"role": "tool", "content": words()}]
            answer = {"role": "assistant", "content": words()}
        messages.append(answer)
    if rng.random() < 0.2:
        messages.append({"role": "user", "content": words()})
    return messages
