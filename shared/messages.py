"""Every message that crosses a process border, one tagged union per channel, each codec built once.

Durable streams carry maps, so that fields can be added with a default; the per-step token items are
arrays (`array_like`), because there are many. `tests/wire/` pins the bytes.
"""

from typing import Literal

import msgspec

from shared.ids import AttemptId, BlockDigest, BlockHash, BlockId, Incarnation, RequestId, WorkerId

PROTOCOL_VERSION = 1
"""Raised when a peer of the older version could misread a message; compared at registration."""

FinishReason = Literal["stop", "length", "cancelled", "error"]
Role = Literal["prefill", "decode"]


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of map-shaped messages. The tag field is `type`."""


# --- requests -----------------------------------------------------------------------------------


class SamplingParams(Message, frozen=True):
    """How to choose tokens and when to end. All of it is replayable from (request, output tokens)."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    seed: int = 0  # always set by the gateway, so that a resumed request continues the same text
    stop_token_ids: tuple[int, ...] = ()  # the model's end tokens included, unless ignore_eos
    min_tokens: int = 0  # of output, before any of stop_token_ids may be chosen
    min_p: float = 0.0  # least probability of a token, as a part of the best one's; 0 = off
    presence_penalty: float = 0.0  # taken off the logit of each token that the output has
    frequency_penalty: float = 0.0  # taken off as often as the output has it
    repetition_penalty: float = 1.0  # logits of tokens in prompt or output: divided by it if above 0, else multiplied
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to these tokens' logits
    logprobs: int | None = None  # tell each token's, and those of so many best ones; None = none
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second on
    grammar: str = ""  # llguidance's text of what the output may be (`shared.grammar`); "" = anything


class GenerateRequest(Message, frozen=True, tag="generate"):
    """What a client asked. Stored once, in Redis; tasks refer to it by id."""

    request_id: RequestId
    gateway: Incarnation  # whose token stream gets the answer
    token_ids: tuple[int, ...]  # prompt, at least one token
    root_hash: BlockHash  # parent of the first block (`shared.hashing.chain_root`): salt and adapter are in it
    block_hashes: tuple[BlockHash, ...]  # of the prompt's full blocks, in order
    sampling: SamplingParams
    tenant: str = ""
    adapter: str = ""
    priority: int = 0  # lower is served first
    num_choices: int = 1  # answers to the one prompt: one lease, one epoch, one handoff for all of them


class RequestState(Message, frozen=True):
    """What a worker or the scheduler loads before it works on a request."""

    request: GenerateRequest
    epoch: int
    output: tuple[int, ...] = ()  # tokens of choice 0 already sent to the client, from the token log
    others: tuple[tuple[int, ...], ...] = ()  # those of the further choices; () where none was sent

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and the tokens already sent (of choice 0): what the KV must cover."""
        return self.request.token_ids + self.output

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Tokens already sent, by choice."""
        return (self.output, *(self.others or ((),) * (self.request.num_choices - 1)))


# --- scheduler's stream: `sched` ------------------------------------------------------------------


class Admitted(Message, frozen=True, tag="admitted"):
    """A request waits for dispatch; also written by requeue, with the raised epoch."""

    request_id: RequestId
    epoch: int


class Ended(Message, frozen=True, tag="ended"):
    """A request was completed, cancelled or failed: the scheduler's ledger forgets it."""

    request_id: RequestId


class CreditFreed(Message, frozen=True, tag="credit"):
    """A decode worker gave credit back: a waiting request may fit now."""

    incarnation: Incarnation


class WorkerJoined(Message, frozen=True, tag="joined"):
    incarnation: Incarnation


class WorkerDraining(Message, frozen=True, tag="draining"):
    """The worker takes nothing new; it ends when its work has."""

    incarnation: Incarnation


SchedulerMsg = Admitted | Ended | CreditFreed | WorkerJoined | WorkerDraining


# --- worker's streams: `work:<incarnation>` and `control:<incarnation>` -----------------------------


class Endpoint(Message, frozen=True):
    """Where one rank of a worker serves its blocks."""

    host: str
    port: int
    shm_path: str = ""  # unix socket that hands out the pool's memory file; "" = not offered
    host_id: str = ""  # equal only on machines that share memory


class SourceRef(Message, frozen=True):
    """Where a reader pulls the blocks of a request from, and what allows it to."""

    worker_id: WorkerId
    incarnation: Incarnation
    endpoints: tuple[Endpoint, ...]
    capability: bytes  # see shared.capability


class PrefillTask(Message, frozen=True, tag="prefill"):
    """Compute the prompt's KV and the first token, announce blocks to the reader as they fill."""

    request_id: RequestId
    epoch: int
    attempt: AttemptId
    term: int
    num_prompt_tokens: int  # prompt plus tokens already sent
    reader: Incarnation


class DecodeTask(Message, frozen=True, tag="decode"):
    """Generate. With a source: pull the prompt's blocks first; without: compute the prompt here."""

    request_id: RequestId
    epoch: int
    attempt: AttemptId
    term: int
    num_prompt_tokens: int
    credit_blocks: int
    source: SourceRef | None = None


WorkerMsg = PrefillTask | DecodeTask


class Cancel(Message, frozen=True, tag="cancel"):
    """Drop all work on the request whose epoch is at most this one; or one choice's, at this very epoch. Idempotent."""

    request_id: RequestId
    epoch: int
    reason: str = ""
    choice: int = -1  # -1 = all of them


class ResendKv(Message, frozen=True, tag="resend_kv"):
    """The prefix index missed events of this worker: publish `cleared` and all cached blocks."""


ControlMsg = Cancel | ResendKv


# --- gateway's stream: `tokens:<incarnation>` -------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of a token's probability and of the most probable ones at its place, by the model's logits as
    they are: before bias, penalties, temperature and cuts."""

    logprob: float
    rank: int  # 1 = no token was more probable
    top: tuple[tuple[int, float], ...] = ()  # token, logprob; the most probable first


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Output tokens of one choice, from `index` (0 = the first token after the prompt)."""

    request_id: RequestId
    epoch: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0  # prompt tokens that nobody had to compute; told with the attempt's first token
    logprobs: tuple[TokenLogprobs, ...] = ()  # aligned with token_ids, if they were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with choice 0's first token: of the prompt's tokens 1 and on


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The one terminal event of an accepted request, after all of its choices have ended."""

    request_id: RequestId
    epoch: int
    reason: FinishReason  # of choice 0; the others' follow from their tokens
    num_output_tokens: int = 0  # of choice 0
    num_cached_tokens: int = 0  # prompt tokens that nobody had to compute
    error: str = ""
    others: tuple[int, ...] = ()  # output tokens of the further choices


class EpochRaised(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The request goes on elsewhere: events of lower epochs are void from here on."""

    request_id: RequestId
    epoch: int
    num_output_tokens: int  # length of choice 0's token log at that moment
    others: tuple[int, ...] = ()  # of the further choices' logs


GatewayMsg = Tokens | Finished | EpochRaised


# --- workers ---------------------------------------------------------------------------------------


class Registration(Message, frozen=True, tag="worker"):
    """What a worker says of itself, before it gets work."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    model: str  # the name that clients use
    fingerprint: str  # pool compatibility: model digest, KV dtype, layout, block size, numerics version
    protocol: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    endpoints: tuple[Endpoint, ...]
    health_url: str = ""


# --- KV events: `kv`; index questions: `index`; answers: `reply:<incarnation>` ------------------------


class Stored(Message, frozen=True, tag="stored"):
    hashes: tuple[BlockHash, ...]


class Removed(Message, frozen=True, tag="removed"):
    hashes: tuple[BlockHash, ...]


class Cleared(Message, frozen=True, tag="cleared"):
    """The worker's cache is empty now."""


class KvEvents(Message, frozen=True, tag="kv"):
    """What changed in one worker's prefix cache, in order; `seq` counts messages from 1 without gaps."""

    incarnation: Incarnation
    fingerprint: str
    seq: int
    events: tuple[Stored | Removed | Cleared, ...]


class WorkerGone(Message, frozen=True, tag="gone"):
    """The incarnation is dead; the index forgets it."""

    incarnation: Incarnation


IndexEventMsg = KvEvents | WorkerGone


class MatchQuery(Message, frozen=True, tag="match"):
    """Who holds the longest run of these blocks, from the first?"""

    query_id: int
    reply_to: Incarnation
    fingerprint: str
    hashes: tuple[BlockHash, ...]


class MatchReply(Message, frozen=True, tag="matched"):
    query_id: int
    num_blocks: dict[str, int]  # incarnation -> leading blocks held; absent = none


# --- block transfer, between two workers (see services/transfer) --------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First frame of a connection, from the reader."""

    protocol: int
    reader: Incarnation
    fingerprint: str
    source: Incarnation  # whom the reader believes it talks to


class HelloOk(Message, frozen=True, tag="hello_ok"):
    block_bytes: int
    num_blocks: int


class Refused(Message, frozen=True, tag="refused"):
    """Answer to a `Hello` (no request named: the connection ends) or to a `Want`."""

    reason: str
    request_id: RequestId = RequestId("")
    epoch: int = 0


class Want(Message, frozen=True, tag="want"):
    """The reader asks to be told of the blocks of a request as they fill."""

    request_id: RequestId
    epoch: int
    attempt: AttemptId
    capability: bytes


class FirstToken(Message, frozen=True):
    """What prefill knows that decode cannot recompute from blocks."""

    index: int
    token_id: int  # of choice 0
    num_cached_tokens: int = 0
    others: tuple[int, ...] = ()  # the further choices' first tokens
    logprobs: tuple[TokenLogprobs, ...] = ()  # by choice, if they were asked for


class Ready(Message, frozen=True, tag="ready"):
    """These blocks are filled and pinned. `first_block` is the logical index of the first."""

    request_id: RequestId
    epoch: int
    first_block: int
    block_ids: tuple[BlockId, ...]
    digests: tuple[BlockDigest, ...]
    last: FirstToken | None = None  # set on the final one


class Gone(Message, frozen=True, tag="gone_request"):
    """The source will announce nothing more of this request: cancelled, failed or expired."""

    request_id: RequestId
    epoch: int
    reason: str
    over: bool = False  # the attempt itself is over (it ended with its first token, or was cancelled): do nothing more


class Read(Message, frozen=True, tag="read"):
    """tcp only: send the bytes of these blocks, in this order, after a `Data` header."""

    request_id: RequestId
    epoch: int
    block_ids: tuple[BlockId, ...]


class Data(Message, frozen=True, tag="data"):
    """tcp only: `num_bytes` raw bytes follow this frame."""

    request_id: RequestId
    epoch: int
    num_bytes: int


class Release(Message, frozen=True, tag="release"):
    """The reader has read all that it wants."""

    request_id: RequestId
    epoch: int
    attempt: AttemptId


class ReleaseAnswer(Message, frozen=True, tag="released"):
    """`held`: every announced block stayed pinned until now; `stale`: throw the bytes away."""

    request_id: RequestId
    epoch: int
    answer: Literal["held", "stale"]


ReaderMsg = Hello | Want | Read | Release
SourceMsg = HelloOk | Refused | Ready | Gone | Data | ReleaseAnswer


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode
decode_registration = msgspec.msgpack.Decoder(Registration).decode
