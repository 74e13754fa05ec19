"""Chat templates, against transformers' own rendering where it has one."""

from typing import Any

import pytest

from services.gateway.chat_template import ChatTemplate
from services.gateway.errors import ApiError
from shared.clock import ManualClock
from shared.errors import ModelError
from shared.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": 'Say "<b>" & é\n'},
    {"role": "user", "content": "  hi  "},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "漢"},
]

TEMPLATES = [
    "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content | trim }}\n    {% endif %}\n{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ bos_token }}{{ eos_token }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!",
    "{% if tools is none and documents is none and not missing %}A{% endif %}"
    "{% if add_generation_prompt %}B{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ManualClock(86400.0 * 365))


def by_transformers(source: str, messages: list[dict[str, str]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages],
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    return rendered[0]


@pytest.mark.parametrize("source", TEMPLATES)
def test_rendering_equals_transformers(source: str):
    """Whitespace, tojson, loop controls, the generation tag, and the variables that are given."""
    assert template(source).render(MESSAGES) == by_transformers(source, MESSAGES)


def test_the_default_models_template_equals_transformers(tokenizer: Tokenizer):
    """With and without a system message."""
    source = tokenizer.chat_template
    assert source is not None
    for messages in (MESSAGES, MESSAGES[1:]):
        assert template(source).render(messages) == by_transformers(source, messages)


def test_the_date_is_the_clocks():
    """Some templates print the date."""
    assert template("{{ strftime_now('%Y') }}").render(MESSAGES) == "1971"


def test_a_template_that_refuses_is_the_clients_fault():
    """raise_exception's words reach the client, as a 400 on `messages`."""
    with pytest.raises(ApiError, match="roles must alternate") as refusal:
        template("{{ raise_exception('roles must alternate') }}").render(MESSAGES)
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[99].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_or_escapes_is_a_400(source: str):
    """The sandbox holds, and nothing becomes a 500."""
    with pytest.raises(ApiError) as refusal:
        template(source).render(MESSAGES)
    assert refusal.value.status == 400


def test_a_broken_template_stops_the_boot():
    """ModelError, before the first request."""
    broken: Any = "{% for %}"
    with pytest.raises(ModelError, match="not valid"):
        template(broken)
