"""From prompts to requests: tokenised once, hashed once, and sure to fit."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from services.gateway.body import OFFLOAD_BYTES
from services.gateway.errors import ApiError, bad_field, bus_lost, no_worker
from services.gateway.output_params import Changes
from services.gateway.params import Params
from services.gateway.ports import RequestPort
from services.gateway.prompts import Prompt
from shared.config import GatewayConfig
from shared.errors import BusError
from shared.hashing import block_hashes, chain_root
from shared.ids import BlockHash, Incarnation, RequestId
from shared.messages import GenerateRequest, SamplingParams
from shared.offload import Offload
from shared.randomness import Randomness
from shared.tokenizer import Tokenizer

_OFFLOAD_TOKENS = 16_384  # more are hashed off the event loop
MAX_PROMPT_LOGPROBS = 100_000  # entries of an answer; about 70 bytes of JSON each


@dataclass(frozen=True, slots=True)
class Limits:
    """What the live workers can take."""

    max_model_len: int
    block_size: int


async def live_limits(port: RequestPort) -> Limits:
    """:raises ApiError: 503, nobody could decode (prefill workers alone cannot serve)."""
    try:
        workers = await port.workers()
    except BusError:
        raise bus_lost() from None
    if not any(worker.role == "decode" for worker in workers):
        raise no_worker()
    return Limits(min(worker.max_model_len for worker in workers), workers[0].block_size)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    token_ids: tuple[int, ...]
    hashes: tuple[BlockHash, ...]


class Preparer:
    """Makes requests. Owns the chain's root: the salt is the deployment's or the authenticated tenant's, never the
    client's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        incarnation: Incarnation,
        config: GatewayConfig,
        offload: Offload,
        randomness: Randomness,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_token_bytes = tokenizer.max_token_bytes
        self._incarnation = incarnation
        self._config = config
        self._tenant = ""
        self._root = _root(config, "")
        self._offload = offload
        self._randomness = randomness

    def for_tenant(self, tenant: str) -> "Preparer":
        """The same for a tenant's requests."""
        if tenant == self._tenant:
            return self
        other = copy(self)
        other._tenant, other._root = tenant, _root(self._config, tenant)
        return other

    async def tokens(
        self, prompts: Sequence[Prompt], limits: Limits, *, param: str, add_special_tokens: bool
    ) -> list[PromptTokens]:
        """Token ids and block hashes of every prompt.

        :raises ApiError: 400, a prompt leaves no room for an answer.
        """
        size = sum(len(p) for p in prompts if isinstance(p, str))
        num_ids = sum(len(p) for p in prompts if not isinstance(p, str))
        args = (prompts, limits, param, add_special_tokens)
        if size > OFFLOAD_BYTES // 8 or num_ids > _OFFLOAD_TOKENS:
            return await self._offload.run(self._tokens, *args)
        return self._tokens(*args)

    def requests(
        self,
        name: str,
        prompts: Sequence[PromptTokens],
        params: Params,
        limits: Limits,
        default_max_tokens: int,
        randomness: Randomness | None = None,
        grammar: str = "",
    ) -> list[GenerateRequest]:
        """One request for each prompt. `name` is the response's id.

        :param grammar: as `GrammarChecker.check` gave it.
        :param randomness: where seeds come from that the client left out; None: anywhere.
        :raises ApiError: 400, prompt and `max_tokens` do not fit together, or too much is asked about the prompts.
        """
        changes = params.changes
        ends = () if params.ignore_eos else self._tokenizer.end_token_ids
        self._check_ids(changes)
        _check_told([len(prompt.token_ids) for prompt in prompts], params)
        out: list[GenerateRequest] = []
        for i, prompt in enumerate(prompts):
            seed = (randomness or self._randomness).integer() if params.seed is None else params.seed
            out.append(
                GenerateRequest(
                    request_id=RequestId(name if len(prompts) == 1 else f"{name}-{i}"),
                    gateway=self._incarnation,
                    token_ids=prompt.token_ids,
                    root_hash=self._root,
                    block_hashes=prompt.hashes,
                    tenant=self._tenant,
                    sampling=SamplingParams(
                        max_tokens=_fit(len(prompt.token_ids), params.max_tokens, limits, default_max_tokens),
                        temperature=params.temperature,
                        top_p=params.top_p,
                        top_k=params.top_k,
                        seed=seed,
                        stop_token_ids=tuple(dict.fromkeys((*ends, *changes.stop_token_ids))),
                        min_tokens=changes.min_tokens,
                        min_p=changes.min_p,
                        presence_penalty=changes.presence_penalty,
                        frequency_penalty=changes.frequency_penalty,
                        repetition_penalty=changes.repetition_penalty,
                        logit_bias=changes.logit_bias,
                        logprobs=changes.logprobs,
                        prompt_logprobs=changes.prompt_logprobs,
                        grammar=grammar,
                    ),
                    priority=params.priority,
                    num_choices=params.best_of,
                )
            )
        return out

    def _check_ids(self, changes: Changes) -> None:
        size = self._tokenizer.vocab_size
        for name, ids in (
            ("logit_bias", [token for token, _ in changes.logit_bias]),
            ("stop_token_ids", changes.stop_token_ids),
        ):
            if any(token >= size for token in ids):
                raise bad_field(name, f"{name}: token ids must be between 0 and {size - 1}.")

    def _tokens(self, prompts: Sequence[Prompt], limits: Limits, param: str, special: bool) -> list[PromptTokens]:
        return [self._one(prompt, limits, param, special) for prompt in prompts]

    def _one(self, prompt: Prompt, limits: Limits, param: str, special: bool) -> PromptTokens:
        if isinstance(prompt, str):
            self.refuse_hopeless(prompt, limits, param)
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=special)
        else:
            token_ids = prompt
        if not token_ids:
            raise bad_field(param, f"{param} is empty.")
        if len(token_ids) >= limits.max_model_len:
            raise _overflow(param, limits, f"the prompt has {len(token_ids)} tokens")
        longest = self._config.max_prompt_tokens
        if longest and len(token_ids) > longest:
            message = f"This server takes prompts of at most {longest} tokens; this one has {len(token_ids)}."
            raise bad_field(param, message, "prompt_too_long")
        return PromptTokens(tuple(token_ids), block_hashes(self._root, token_ids, limits.block_size))

    def refuse_hopeless(self, text: str, limits: Limits, param: str) -> None:
        """A text that cannot fit however it is tokenised is not tokenised.

        :raises ApiError: 400 that names `param`.
        """
        longest = self._max_token_bytes
        if longest is not None and len(text) > longest * limits.max_model_len:
            raise _overflow(param, limits, f"the prompt has more than {len(text) // longest} tokens")


def _root(config: GatewayConfig, tenant: str) -> BlockHash:
    """Parent of the first blocks of a tenant's prompts."""
    salt = config.prefix_salt.encode()
    if config.cache_salt == "deployment":
        return chain_root(salt=salt)
    return chain_root(salt=b"tenant\0" + chain_root(salt=salt) + tenant.encode())


def _fit(num_prompt_tokens: int, max_tokens: int | None, limits: Limits, default: int) -> int:
    room = limits.max_model_len - num_prompt_tokens
    if max_tokens is None:
        return min(default, room)
    max_tokens = max(1, max_tokens)  # one is generated even where none is shown
    if max_tokens > room:
        raise _overflow(
            "max_tokens", limits, f"the prompt has {num_prompt_tokens} and max_tokens asks for {max_tokens}"
        )
    return max_tokens


def _check_told(lengths: Sequence[int], params: Params) -> None:
    """:raises ApiError: 400, the prompts' log-probabilities would make an answer too large to be written at once."""
    top = params.changes.prompt_logprobs
    if top is None:
        return
    count = params.n * sum(lengths) * (top + 1)
    if count > MAX_PROMPT_LOGPROBS:
        message = (
            f"Log-probabilities of prompts (prompt_logprobs, or echo with logprobs): n times all prompts' tokens times "
            f"one more than the top ones asked for may be at most {MAX_PROMPT_LOGPROBS}; here it is {count}."
        )
        raise bad_field("prompt_logprobs", message, "too_many_logprobs")


def _overflow(param: str, limits: Limits, what: str) -> ApiError:
    message = f"The model's context is {limits.max_model_len} tokens, prompt and answer together; {what}."
    return bad_field(param, message, "context_length_exceeded")
