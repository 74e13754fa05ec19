"""Planted bugs of submissions through Redis. See `mutants.py`."""

from typing import Any

from services.gateway.queue_ingress import QueueIngress
from tests.sim.mutant import Mutant, lua, python
from tests.sim.wrong import do_nothing

WIDOWS = ("widow", "widow", "blink")
GATEWAYS = ("widow", "doze_gateway")
LOSSES = ("lost_replies",)
STUPORS = ("stupor", "hang")
ALONE: dict[str, Any] = {"queued": 0.8, "sizes": (("num_gateways", 1), ("num_prefill", 0), ("num_decode", 1))}
"""Nobody takes over and no work ends, so a gateway that is given up comes back to its own cancelled requests."""

OF_THE_QUEUE: tuple[Mutant, ...] = (
    lua(
        "a lost submission is opened",
        "submit_open",
        "return {'gone'}",
        "local _ = 0",
        ("doze_gateway", "wipe"),
        queued=0.8,
    ),
    lua("nobody owns a submission", "submit_open", "redis.call('HSET', KEYS[1], 'owner', ARGV[1])"),
    lua(
        "the same id is work again",
        "submit_open",
        "if r[1] and (r[1] ~= ARGV[3] or r[2] == 'done') then",
        "if r[1] and r[2] == 'done' then",
    ),
    lua(
        "an opening whose answer was lost counts",
        "submit_open",
        "if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[7] then",
        "if true then",
        ("deafness",),
        queued=0.8,
        every_s=1.0,
    ),
    lua("a repeat is not acknowledged", "submit_open", "redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])", "1"),
    lua(
        "two gateways write one result",
        "result_add",
        "if s[1] ~= ARGV[1] or s[2] ~= 'open' or",
        "if s[2] ~= 'open' or",
        GATEWAYS,
    ),
    lua(
        "what is out is not written down",
        "result_add",
        "redis.call('HSET', KEYS[1], n, offset + count, c,",
        "redis.call('HSET', KEYS[1], c,",
    ),
    lua(
        "a result repeats itself",
        "result_add",
        "if offset ~= tokens then return -1 end",
        "",
        LOSSES,
        also=(("if offset + count > tokens or tonumber(ARGV[a + 3]) > chars then", "if true then"),),
    ),
    lua("a result stays for ever", "result_add", "for i = 1, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[2]) end"),
    lua("an end is not acknowledged", "submit_end", "redis.call('XACK', KEYS[3], ARGV[2], ARGV[3])"),
    lua("a submission ends twice", "submit_end", "if s[2] == 'done' then return 1 end", "", LOSSES, queued=0.8),
    lua("no dead letter", "submit_end", "if ARGV[9] ~= '' then", "if false then"),
    lua(
        "adoption at the same epoch", "submit_adopt", "tonumber(ARGV[3]) + 1, redis", "tonumber(ARGV[3]), redis", WIDOWS
    ),
    lua("adoption tells no worker", "submit_adopt", "redis.call('XADD', KEYS[9], '*', 'm', ARGV[9])", "", WIDOWS),
    lua("adoption keeps the lease", "submit_adopt", "redis.call('ZREM', KEYS[4], ARGV[2])", "", WIDOWS),
    lua(
        "adoption leaves prefill's book",
        "submit_adopt",
        "redis.call('HDEL', KEYS[10], ARGV[2] .. '/' .. ARGV[3])",
        "",
        WIDOWS,
    ),
    lua(
        "adoption leaves no marker",
        "submit_adopt",
        "redis.call('XADD', KEYS[5], '*', 'm', cmsgpack",
        "local _ = (cmsgpack",
        WIDOWS,
    ),
    lua(
        "an end is not told to who adopts it", "submit_adopt", "redis.call('XADD', KEYS[5], '*', 'm', r[5])", "", WIDOWS
    ),
    lua(
        "an adoption is not its nonce's",
        "submit_adopt",
        "if r[6] == ARGV[10] then return 'adopted' end",
        "",
        LOSSES,
        queued=0.8,
    ),
    lua(
        "nobody renews a submission",
        "submit_renew",
        "redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[1], 0, entry, 'IDLE', ARGV[3], 'JUSTID')",
    ),
    lua(
        "anybody ends a submission",
        "submit_end",
        "if s[1] ~= ARGV[1] or s[5] ~= ARGV[3] then return 0 end",
        "if s[5] ~= ARGV[3] then return 0 end",
        ("last_word",),
        queued=0.8,
    ),
    lua("an adopted request expires", "submit_adopt", "redis.call('PERSIST', KEYS[2])", "", STUPORS, **ALONE),
    lua("an adopted request's log expires", "submit_adopt", "redis.call('PERSIST', KEYS[7])", "", STUPORS, **ALONE),
    python("a dead gateway's submissions wait for ever", QueueIngress, "_claim", do_nothing, ("widow",)),
)
