"""One sample of every message, with every field set. `python -m tests.wire.samples` prints the golden file anew:
only for a deliberate change of the wire, with PROTOCOL_VERSION raised if an old peer could misread it."""

import json
from typing import Any

from shared import messages as m
from shared.ids import AttemptId, BlockDigest, BlockHash, BlockId, Incarnation, RequestId, WorkerId

R, A = RequestId("cmpl-0001"), AttemptId("a1b2")
GW, P, D = Incarnation("gateway-1"), Incarnation("prefill-1"), Incarnation("decode-1")
H1, H2 = BlockHash(bytes(range(16))), BlockHash(bytes(range(16, 32)))
DIGEST = BlockDigest(bytes(range(32, 48)))

SAMPLING = m.SamplingParams(
    max_tokens=64,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    seed=7,
    stop_token_ids=(2, 0),
    min_tokens=3,
    min_p=0.125,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias=((9, -100.0),),
    logprobs=2,
    prompt_logprobs=0,
    grammar='start: "a"',
)
LOGPROBS = m.TokenLogprobs(-0.5, 2, ((12, -0.25), (11, -0.5)))
REQUEST = m.GenerateRequest(
    request_id=R,
    gateway=GW,
    token_ids=(1, 300, 70000),
    root_hash=H1,
    block_hashes=(H2,),
    sampling=SAMPLING,
    tenant="t",
    adapter="lora",
    priority=-1,
    num_choices=2,
)
ENDPOINT = m.Endpoint(host="127.0.0.1", port=9000, shm_path="/run/p.sock", host_id="h")
SOURCE = m.SourceRef(worker_id=WorkerId("prefill-0"), incarnation=P, endpoints=(ENDPOINT,), capability=b"\x01\x02")
FIRST = m.FirstToken(index=3, token_id=42, num_cached_tokens=16, others=(43,), logprobs=(LOGPROBS, LOGPROBS))
TASK: dict[str, Any] = {"request_id": R, "epoch": 2, "attempt": A, "term": 5, "num_prompt_tokens": 33}

SAMPLES: dict[str, Any] = {
    "sampling": SAMPLING,
    "request": REQUEST,
    "state": m.RequestState(request=REQUEST, epoch=2, output=(9, 10), others=((8,),)),
    "admitted": m.Admitted(request_id=R, epoch=1),
    "ended": m.Ended(request_id=R),
    "credit_freed": m.CreditFreed(incarnation=D),
    "joined": m.WorkerJoined(incarnation=D),
    "draining": m.WorkerDraining(incarnation=D),
    "endpoint": ENDPOINT,
    "source": SOURCE,
    "prefill_task": m.PrefillTask(reader=D, **TASK),
    "decode_task": m.DecodeTask(credit_blocks=4, source=SOURCE, **TASK),
    "decode_task_alone": m.DecodeTask(credit_blocks=4, **TASK),
    "cancel": m.Cancel(request_id=R, epoch=2, reason="client gone"),
    "cancel_choice": m.Cancel(request_id=R, epoch=2, reason="stop string", choice=1),
    "resend_kv": m.ResendKv(),
    "token_logprobs": LOGPROBS,
    "tokens": m.Tokens(R, 2, 0, 5, (11, 12)),
    "tokens_with_logprobs": m.Tokens(R, 2, 1, 5, (11,), 16, (LOGPROBS,), (LOGPROBS,)),
    "finished": m.Finished(R, 2, "length", 64, 16, "why", (3,)),
    "epoch_raised": m.EpochRaised(R, 3, 7, (5,)),
    "registration": m.Registration(
        worker_id=WorkerId("decode-0"),
        incarnation=D,
        role="decode",
        model="m",
        fingerprint="f",
        protocol=1,
        block_size=16,
        num_blocks=100,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        endpoints=(ENDPOINT,),
        health_url="http://127.0.0.1:9100",
    ),
    "stored": m.Stored(hashes=(H1, H2)),
    "removed": m.Removed(hashes=(H1,)),
    "cleared": m.Cleared(),
    "kv_events": m.KvEvents(
        incarnation=D, fingerprint="f", seq=3, events=(m.Cleared(), m.Stored(hashes=(H1,)), m.Removed(hashes=(H2,)))
    ),
    "worker_gone": m.WorkerGone(incarnation=D),
    "match_query": m.MatchQuery(query_id=1, reply_to=GW, fingerprint="f", hashes=(H1, H2)),
    "match_reply": m.MatchReply(query_id=1, num_blocks={"decode-1": 2}),
    "hello": m.Hello(protocol=1, reader=D, fingerprint="f", source=P),
    "hello_ok": m.HelloOk(block_bytes=368640, num_blocks=512),
    "refused": m.Refused(reason="why"),
    "want": m.Want(request_id=R, epoch=2, attempt=A, capability=b"\x01\x02"),
    "first_token": FIRST,
    "ready": m.Ready(request_id=R, epoch=2, first_block=4, block_ids=(BlockId(7),), digests=(DIGEST,), last=FIRST),
    "gone_request": m.Gone(request_id=R, epoch=2, reason="cancelled", over=True),
    "read": m.Read(request_id=R, epoch=2, block_ids=(BlockId(7), BlockId(300))),
    "data": m.Data(request_id=R, epoch=2, num_bytes=368640),
    "release": m.Release(request_id=R, epoch=2, attempt=A),
    "release_answer": m.ReleaseAnswer(request_id=R, epoch=2, answer="held"),
}

if __name__ == "__main__":
    print(json.dumps({name: m.encode(sample).hex() for name, sample in SAMPLES.items()}, indent=1))
