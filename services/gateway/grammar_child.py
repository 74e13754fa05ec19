"""The process that tries clients' grammars: `python -m services.gateway.grammar_child <model>`.

Compiling some grammars takes exponential time or memory, and a thread cannot be stopped. So it is tried here first,
where it can be. Speaks JSON lines: `{"kind", "text"}` in, `{"grammar"}` or `{"error"}` out; the first line out says
whether it can serve.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.errors import BatonError, GrammarError
from shared.grammar import Vocabulary, to_grammar
from shared.tokenizer import load_tokenizer

MAX_MEMORY_BYTES = 4 << 30
"""Address space, with the libraries and the vocabulary."""
MAX_CPU_S = 30
"""For one grammar; the gateway has less patience, but may be gone."""


def main(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        vocabulary = Vocabulary(load_tokenizer(Path(path)))
    except BatonError as exc:
        _say({"error": str(exc)})
        return
    _say({})
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + MAX_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            _say({"grammar": tried(vocabulary, ask["kind"], ask["text"])})
        except GrammarError as exc:
            _say({"error": str(exc)})


def tried(vocabulary: Vocabulary, kind: Any, text: str) -> str:
    """The grammar's text, which can be compiled and allows something at its start.

    :raises GrammarError: the reason why not, for the client.
    """
    grammar = to_grammar(kind, text)
    row = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
    vocabulary.matcher(grammar).fill(row)
    return grammar


def _say(value: dict[str, str]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
