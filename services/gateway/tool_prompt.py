"""Tools in words, for models whose chat template does not know them (SmolLM2's, for one).

The wording is the form that Hermes and Qwen models were trained on: the functions in `<tools>`, calls in `<tool_call>`,
results in `<tool_response>`, all results of a turn in one message. The functions end the system message; where there is
none they are one, or begin the first message if the template has no system messages (Gemma's, for one).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.messages import ChatMessage

_HEAD = """# Tools

You may call one or more functions to assist with the user query. The functions are described within <tools></tools>:
<tools>
"""
_TAIL = """
</tools>

For each function call, answer with a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{"name": <function name>, "arguments": <arguments as a JSON object>}
</tool_call>"""


def without_tools(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, takes_system: bool = True
) -> list[ChatMessage]:
    """The same conversation in plain messages."""
    out: list[ChatMessage] = []
    for before, message in zip((None, *messages), messages, strict=False):
        worded = _worded(message)
        if before is not None and before["role"] == message["role"] == "tool":
            out[-1] = out[-1] | {"content": f"{out[-1]['content']}\n{worded['content']}"}
        else:
            out.append(worded)
    if not tools:
        return out
    text = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL
    if out[0]["role"] in ("system", "developer"):
        out[0] = out[0] | {"content": f"{out[0]['content']}\n\n{text}" if out[0]["content"] else text}
        return out
    if not takes_system:
        return [out[0] | {"content": f"{text}\n\n{out[0]['content']}"}, *out[1:]]
    return [{"role": "system", "content": text}, *out]


def _worded(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    texts += [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}
