"""Tools in words, for models whose chat template does not know them (SmolLM2's, for one).

The wording is the form that Hermes and Qwen models were trained on: the functions in `<tools>`, calls in `<tool_call>`,
results in `<tool_response>`. It goes in front of the system message, or of the first message where there is none.
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


def without_tools(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The same conversation in plain messages."""
    out = [_worded(message) for message in messages]
    if not tools:
        return out
    text = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL
    if out[0]["role"] in ("system", "developer"):
        out[0] = out[0] | {"content": f"{out[0]['content']}\n\n{text}" if out[0]["content"] else text}
        return out
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
