"""Token masks of seqs that follow a grammar.

A seq's place in its grammar is a function of its output tokens: kept between steps for speed alone, and rebuilt by
replay wherever it is not there (a handoff, a preempted or resumed seq, a forgotten one).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import structlog

from services.engine.types import SampleSpec, SeqId
from shared.errors import GrammarError
from shared.grammar import Matcher, Vocabulary
from shared.offload import Offload

if TYPE_CHECKING:
    from services.engine.sampler import AllowedTokens  # brings torch, which planner and simulation do without

log = structlog.get_logger(__name__)
MAX_COMPILED = 128
"""Grammars kept ready. Clients mostly send the same ones again."""
_ALL = np.uint32(0xFFFFFFFF)

Wanted = tuple[SeqId, SampleSpec]


class Grammars:
    """`prepare` is called on the event loop, `masks` in the step's thread."""

    def __init__(self, load: Callable[[], Vocabulary], offload: Offload, max_seqs: int) -> None:
        """:param load: makes the vocabulary; called with the first grammar, off the event loop.
        :param offload: where grammars are compiled, beside the steps.
        :param max_seqs: places kept between steps.
        """
        self._load, self._offload, self._max_places = load, offload, max_seqs
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()  # at the start; never advanced, only copied
        self._places: OrderedDict[tuple[SeqId, int], Matcher] = OrderedDict()

    async def prepare(self, grammar: str) -> None:
        """Compile, so that no step waits for it.

        :raises GrammarError: it cannot be. The gateway has tried it before, so it is this worker that differs.
        """
        if grammar not in self._compiled:
            await self._offload.run(self._start, grammar)

    def masks(self, wanted: Sequence[Wanted]) -> tuple[AllowedTokens | None, dict[int, str]]:
        """Allowed tokens `[len(wanted), ceil(vocab / 32)]`, None if no seq has a grammar; and the rows which cannot go
        on, with the reason. Those rows are all set."""
        rows = [i for i, (_, spec) in enumerate(wanted) if spec.sampling.grammar]
        if not rows:
            return None, {}
        broken: dict[int, str] = {}
        allowed: AllowedTokens | None = None
        for i in rows:
            seq_id, spec = wanted[i]
            try:
                place = self._place(seq_id, spec)
                if allowed is None:
                    allowed = np.full((len(wanted), -(-self._vocab_size() // 32)), _ALL, np.uint32)
                place.fill(allowed[i])
            except GrammarError as exc:
                broken[i] = f"grammar: {exc}"
                self._places.pop((seq_id, spec.choice), None)
                if allowed is not None:
                    allowed[i] = _ALL
        return allowed, broken

    def _place(self, seq_id: SeqId, spec: SampleSpec) -> Matcher:
        """The matcher after the seq's output so far."""
        key = (seq_id, spec.choice)
        num_output = spec.position - spec.num_prompt_tokens
        place = self._places.pop(key, None)
        if place is None or place.num_tokens > num_output:
            place = self._start(spec.sampling.grammar).copy()
        first = spec.num_prompt_tokens + place.num_tokens
        place.advance(spec.tokens[first : spec.position])
        self._places[key] = place
        while len(self._places) > self._max_places:
            self._places.popitem(last=False)
        return place

    def _start(self, grammar: str) -> Matcher:
        """The matcher before any output. Both threads may come here: at worst one compiles in vain."""
        ready = self._compiled.get(grammar)
        if ready is None:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            ready = self._compiled[grammar] = self._vocabulary.matcher(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return ready

    def _vocab_size(self) -> int:
        assert self._vocabulary is not None
        return self._vocabulary.vocab_size
