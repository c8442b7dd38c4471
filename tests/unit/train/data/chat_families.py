"""Chat templates with the structure of those that people fine-tune, as small as shows it, and the stop tokens of their models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LLAMA = """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Today: {{ strftime_now("%d %b %Y") }}<|eot_id|>
{%- for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

CHATML = """{% for message in messages %}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{- '\n' ~ message.content if message.content else '' }}
{%- for call in message.tool_calls or [] %}

<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

# The thought, of a field or of the content, stays where no question follows it; the last answer has one, be it empty.
PARTS = """{%- macro answer_of(message) -%}{{ (message.content or '').split('</think>')[-1].lstrip('\\n') }}{%- endmacro -%}
{%- macro thought_of(message) -%}{{ (message.reasoning_content or \
((message.content or '').split('</think>')[0].split('<think>')[-1] if '</think>' in (message.content or '') else '')\
).strip('\\n') }}{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
"""
QWEN3 = (
    PARTS
    + """{% for message in messages %}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought_of(message)) %}
<think>
{{ thought_of(message) }}
</think>

{% endif %}
{{ answer_of(message) if message.role == 'assistant' else message.content }}
{%- for call in message.tool_calls or [] %}

<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}
<think>

</think>

{% endif %}
{% endif %}"""
)
GLM = (
    PARTS
    + """[gMASK]<sop>{% for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>
{%- if message.role == 'assistant' %}

<think>{{ thought_of(message) if loop.index0 > ns.last else '' }}</think>
{%- if answer_of(message) %}

{{ answer_of(message).strip() }}
{%- endif %}
{%- for call in message.tool_calls or [] %}

<tool_call>{{ call.function.name }}
<arg_value>{{ call.function.arguments.x }}</arg_value>
</tool_call>
{%- endfor %}
{%- else %}

{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}\
{% endif %}"""
)
# Thoughts are a channel of their own, dropped once a final answer follows; only the last answer ends with <|return|>.
GPT_OSS = """<|start|>system<|message|>Current date: {{ strftime_now("%Y-%m-%d") }}<|end|>
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}\
<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}\
<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}\
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ 'developer' if message.role == 'system' else message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
# The end of the text is rendered after the last message, unless an answer is asked for.
PHI3 = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""
PHI4 = """{% for message in messages %}<|im_start|>{{ message.role }}<|im_sep|>{{ message.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"""
# The system message stands in the last question, and only while that is the last message; roles must alternate.
MISTRAL = """{%- if messages and messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}\
{% else %}{% set rest = messages %}{% endif -%}
<s>
{%- for message in rest %}
{%- if message.role == 'user' %}[INST] {{ system ~ '\\n\\n' if loop.last and system is defined else '' }}{{ message.content }}[/INST]
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS] [{{ message.tool_calls[0].function | tojson }}]</s>
{%- else %} {{ message.content }}</s>
{%- endif %}
{%- endfor %}"""
GEMMA = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content ~ '\\n\\n' %}{% set rest = messages[1:] %}\
{% else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
<bos>
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ system if loop.first else '' }}{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
# Thoughts are dropped from every answer, also the last one, though the generation prompt begins one.
R1 = """<｜begin▁of▁sentence｜>
{%- for message in messages %}
{%- if message.role == 'assistant' %}<｜Assistant｜>{{ message.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>
{%- elif message.role == 'user' %}<｜User｜>{{ message.content }}
{%- else %}{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""
NEMOTRON = (
    PARTS
    + """{% for message in messages %}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'assistant' %}
{% if thought_of(message) and loop.index0 > ns.last %}
<think>
{{ thought_of(message) }}
</think>
{% else %}<think></think>
{%- endif %}
{{- answer_of(message).strip() }}
{%- for call in message.tool_calls or [] %}

<tool_call>
<function={{ call.function.name }}>{{ call.function.arguments.x }}</function>
</tool_call>
{% endfor %}
{%- else %}
{{ message.content }}
{%- endif %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}
{%- endif %}"""
)
COMMAND_A = """<BOS_TOKEN>
{%- for message in messages %}<|START_OF_TURN_TOKEN|>
{%- if message.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>
{%- else %}<|{{ message.role | upper }}_TOKEN|>{{ message.content }}
{%- endif %}<|END_OF_TURN_TOKEN|>
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, what its models stop at, and what the page says of it."""

    name: str
    template: str
    stops: tuple[str, ...]
    thinks: bool = False
    calls: bool = False
    """It renders calls of tools."""
    thought: Callable[[str, str], dict[str, str]] = lambda thought, answer: {"content": f"<think>\n{thought}\n</think>\n\n{answer}"}
    """A message with a thought, as the data of this family hold it."""


FAMILIES = (
    Family("Llama 3", LLAMA, ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), calls=True),
    Family("Qwen2.5, ChatML", CHATML, ("<|endoftext|>", "<|im_end|>"), calls=True),
    Family("Qwen3", QWEN3, ("<|endoftext|>", "<|im_end|>"), thinks=True, calls=True),
    Family("GLM-4.5, 4.6", GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), thinks=True, calls=True),
    Family(
        "gpt-oss",
        GPT_OSS,
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        thinks=True,
        calls=True,
        thought=lambda thought, answer: {"thinking": thought, "content": answer},
    ),
    Family("Phi-3, Phi-3.5", PHI3, ("<|endoftext|>", "<|assistant|>", "<|end|>")),
    Family("Phi-4", PHI4, ("<|endoftext|>", "<|im_end|>")),
    Family("Mistral", MISTRAL, ("</s>",), calls=True),
    Family("Gemma 2, 3", GEMMA, ("<eos>", "<end_of_turn>")),
    Family("DeepSeek-R1", R1, ("<｜end▁of▁sentence｜>",), thinks=True),
    Family("Nemotron-3", NEMOTRON, ("<|im_end|>",), thinks=True, calls=True),
    Family("Command A", COMMAND_A, ("<|END_OF_TURN_TOKEN|>",)),
)
