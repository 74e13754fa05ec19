"""Planted bugs. Each one must make some seed fail; one that survives shows a hole in the simulation.

Where two guards stand behind one another (an epoch and a random attempt id; a digest and a source's `held`), taking one
away alone changes nothing that anybody could see: such mutants take both, or break what the guard itself promises.
"""

from services.decode.worker import DecodeWorker
from services.engine.engine import Engine
from services.gateway.keeper import Keeper
from services.gateway.streams import RequestStream, Streams
from services.prefill.worker import PrefillWorker
from services.prefix_index.index import PrefixIndex
from services.scheduler.ledger import Ledger
from services.scheduler.reaper import Reaper
from services.transfer.fetch import Fetch
from services.transfer.landing import Ticket
from services.transfer.offers import OfferBook
from shared import bus
from shared.bus import RedisReader
from shared.leases import Leases
from shared.redis_link import RedisLink
from shared.roster import Roster
from shared.worker_link import WorkerLink
from tests.sim.mutant import Mutant, few_attempts, lua, python
from tests.sim.mutants_of_choices import OF_CHOICES
from tests.sim.mutants_of_the_queue import OF_THE_QUEUE
from tests.sim.wrong import (
    accept_any_epoch,
    accept_in_silence,
    accept_repeats,
    always_held,
    apply_over_gaps,
    candidates_without_end,
    close_without_cancel,
    do_nothing,
    end_drops,
    everybody,
    expired_by_fifo,
    expired_or_not,
    heartbeat_always,
    ignore,
    load_without_log,
    no_full_refund,
    read_from_where_it_was,
    release_unconfirmed,
    stale_without_refund,
    state_of_now,
)

CRASHES = ("crash", "freeze", "partition")
NAPS = ("nap",)
ISLANDS = ("island",)
GOOD = " or (deadline > 0 and now > tonumber(ARGV[2]))"
WIDOWS = ("widow", "blink", "blink")

MUTANTS: tuple[Mutant, ...] = (
    lua(
        "emit asks for no fence",
        "emit",
        "if not live or r[1] ~= ARGV[a + 1] or r[2] ~= ARGV[a + 2] then",
        "if not live then",
        NAPS,
    ),
    lua("emit goes on after the end", "emit", "if not live or r[1]", "if r[1]", ("blink", "doze"), leavers=0.6),
    lua(
        "emit appends what the log has",
        "emit",
        "string.sub(ARGV[a + 4], (have - index) * 4 + 1)",
        "ARGV[a + 4]",
    ),
    lua(
        "producers trim",
        "emit",
        "return out",
        "redis.call('XTRIM', KEYS[1], 'MAXLEN', 3)\nreturn out",
        ("doze_gateway",),
    ),
    lua(
        "complete keeps the credit",
        "complete",
        "if credit then redis.call('HINCRBY', KEYS[6], 'taken', 0 - credit) end\nredis.call('HDEL', KEYS[7], held)",
    ),
    lua("complete forgets one of the two books", "complete", "redis.call('HDEL', KEYS[7], held)"),
    Mutant(
        "complete asks for no fence",
        ISLANDS,
        "complete",
        "if r[2] ~= ARGV[2] or r[3] ~= ARGV[3] then return 0 end",
        queued=0.0,
        every_s=0.25,
        sizes=(("num_gateways", 1),),
    ),
    lua("complete leaves the request open", "complete", "redis.call('SREM', KEYS[9], ARGV[1])"),
    lua("cancel misses prefill", "cancel", "if ARGV[3] ~= '-' then", "if false then"),
    lua("cancel misses decode", "cancel", "redis.call('XADD', KEYS[8], '*', 'm', ARGV[5])"),
    lua("cancel leaves it in the queue", "cancel", "redis.call('ZREM', KEYS[2], ARGV[1])"),
    lua("cancel keeps the lease", "cancel", "redis.call('ZREM', KEYS[3], ARGV[1])"),
    lua(
        "accept asks for no fence",
        "accept",
        "if r[2] ~= ARGV[2] or r[3] ~= ARGV[3] then return 0 end",
        "",
        NAPS,
    ),
    lua(
        "accept leaves prefill at work in vain",
        "accept",
        "redis.call('XADD', KEYS[4], '*', 'm', ARGV[7])",
        "",
        ("cut", "cut", "slow"),
    ),
    lua(
        "accept lets prefill take the lease back", "accept", "if r[1] == 'decode' and ARGV[5] == 'prefill'", "if false"
    ),
    lua(
        "requeue without a marker",
        "requeue",
        "redis.call('XADD', KEYS[4], '*', 'm', cmsgpack",
        "local _ = (cmsgpack",
        CRASHES,
    ),
    lua("requeue at the same epoch", "requeue", "tonumber(ARGV[2]) + 1\n", "tonumber(ARGV[2])\n", CRASHES),
    Mutant(
        "the reaper takes live leases",
        (),
        "requeue",
        "if not deadline or tonumber(deadline) >",
        "if not deadline or 0 >",
        ((Leases, "expired", expired_or_not),),
    ),
    lua(
        "requeue tells nobody", "requeue", "redis.call('XADD', KEYS[8], '*', 'm', ARGV[8])", "", ("freeze", "partition")
    ),
    lua("dispatch for a deposed scheduler", "dispatch", "return 'deposed'", "local _ = 0", ("usurp", "freeze")),
    lua("dispatch takes no credit", "dispatch", "redis.call('HINCRBY', KEYS[4], 'taken', ARGV[6])"),
    lua("dispatch leaves it in the queue", "dispatch", "redis.call('ZREM', KEYS[2], ARGV[1])"),
    lua("a refund that can be had twice", "refund", "redis.call('HDEL', KEYS[2], ARGV[1])", "local _ = 0"),
    lua("a burial that fences nobody", "bury", "redis.call('HSET', KEYS[2], 'state', 'dead')", "", CRASHES),
    lua("a burial is good for ever", "bury", GOOD, "", ("last_rites",), every_s=1.0),
    lua("a gateway's burial is good for ever", "bury_gateway", GOOD, "", ("last_rites",), every_s=1.0),
    python("an outage ends with its last failure", RedisLink, "_answers_again", ignore, ("last_rites",), every_s=1.0),
    python("no refund on cancel", DecodeWorker, "_refund", no_full_refund),
    python("no refund of a refused end", DecodeWorker, "_stale", stale_without_refund),
    python("decode ignores cancels", DecodeWorker, "cancel", ignore),
    python("prefill ignores cancels", PrefillWorker, "cancel", ignore),
    python("reaper by FIFO", Leases, "expired", expired_by_fifo, ("freeze", "partition", "hang")),
    python("reaping right after a reconnect", Reaper, "_may_reap", lambda self: True, ("redis_down",)),
    python("a gateway is never buried", Reaper, "_bury_gateway", do_nothing, ("crash",)),
    python("a source always says held", OfferBook, "release", always_held),
    python("release is not confirmed", Fetch, "_release", release_unconfirmed),
    python("no digest is compared", Ticket, "settle", lambda self: [], ("flip",)),
    Mutant(
        "blocks are dropped under a fetch", (), patches=((DecodeWorker, "_end", end_drops),), leavers=0.9, queued=0.0
    ),
    python("requeue ignores the token log", Leases, "load", load_without_log, CRASHES),
    python("a gateway believes old epochs", RequestStream, "accept", accept_any_epoch, ("crash", "ghost", "ghost")),
    python("a gateway takes repeats", RequestStream, "_accept_tokens", accept_repeats, ("ghost",), every_s=0.1),
    python("lost requests stay lost", Keeper, "_readmit", do_nothing, ("wipe",)),
    python(
        "a reader goes on where it was",
        RedisReader,
        "_command",
        read_from_where_it_was,
        ("wipe", "jump", "jump"),
        every_s=0.2,
    ),
    Mutant(
        "a reader looks back after outages alone",
        ("setback", "stupor", "wipe"),
        patches=((bus, "LOOK_AGAIN_S", 1e9),),
        every_s=0.3,
        sizes=(("num_gateways", 1),),
    ),
    python("decode computes alone in silence", Leases, "accept", accept_in_silence, ("cut", "cut", "slow")),
    python("a task's state is that of now", WorkerLink, "_state_of", state_of_now, ("bad_steps", "doze"), queued=0.0),
    python("the buried go on", Roster, "heartbeat", heartbeat_always, ("freeze", "partition")),
    python("leases are renewed without progress", WorkerLink, "_is_stuck", lambda self, progress: False, ("hang",)),
    python("the index overlooks holes", PrefixIndex, "apply", apply_over_gaps, ("kv_loss",)),
    python(
        "an idle engine's cache changes are not told",
        Engine,
        "drain_events",
        lambda self: (),
        (),
        leavers=0.9,
        queued=0.0,
        sizes=(("num_blocks", 48), ("num_prefill", 2)),
    ),
    python("no sign after the last KV event", WorkerLink, "_sign", do_nothing, ("kv_loss",)),
    lua(
        "renew asks for no fence",
        "renew",
        "r[1] ~= ARGV[a + 2] or r[2] ~= ARGV[a + 3] or (r[4]",
        "(r[4]",
        ISLANDS,
    ),
    few_attempts("no limit of attempts", "if tonumber(r[6]) + 1 >= tonumber(ARGV[6]) then", "if false then"),
    few_attempts("attempts are not counted", "'tries', r[6] + 1", "'tries', r[6]"),
    lua(
        "requeue asks for no epoch",
        "requeue",
        "if r[2] ~= ARGV[2] or r[3] ~=",
        "if r[3] ~=",
        ("bad_steps", "lost_replies"),
    ),
    lua(
        "requeue leaves prefill's book",
        "requeue",
        "redis.call('HDEL', KEYS[9], ARGV[1] .. '/' .. ARGV[2])",
        "",
        CRASHES,
    ),
    lua("requeue keeps the lease", "requeue", "redis.call('ZREM', KEYS[3], ARGV[1])", "", CRASHES),
    lua(
        "accept of what has ended",
        "accept",
        "if r[1] ~= 'dispatched' and r[1] ~= 'prefill' and r[1] ~= 'decode' then return 0 end",
    ),
    lua(
        "dispatch beyond the credit",
        "dispatch",
        "return 'no_credit'",
        "local _ = 0",
        patches=((Ledger, "candidates", candidates_without_end),),
    ),
    lua(
        "dispatch again at the same epoch",
        "dispatch",
        "if r[1] ~= 'queued' or r[2] ~= ARGV[2] then return 'stale' end",
        "if r[2] ~= ARGV[2] then return 'stale' end",
        ("usurp", "lost_replies"),
    ),
    lua(
        "a lost answer is a second dispatch",
        "dispatch",
        "if r[2] == ARGV[2] and r[3] == ARGV[3] then return 'dispatched' end",
        "if r[2] == ARGV[2] and r[3] == ARGV[3] then r[1] = 'queued' end",
        ("lost_replies",),
    ),
    lua("a refund that is not written down", "refund", "redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])", "local _ = 0"),
    lua("emit keeps no log", "emit", "redis.call('APPEND', log, fresh)", ""),
    lua("the log stays for ever", "complete", "redis.call('PEXPIRE', string.sub(KEYS[5], 1, -2) .. c, ARGV[6])"),
    Mutant("the queue has no bound", None, "admit", "return 'full'", "local _ = 0", sizes=(("max_queued", 8),)),
    lua(
        "a lost answer admits twice",
        "admit",
        "if redis.call('EXISTS', KEYS[1]) == 1 then return 'duplicate' end",
        "",
        ("lost_replies",),
    ),
    lua(
        "the living are buried",
        "bury",
        "if not deadline or deadline >",
        "if not deadline or 0 >",
        patches=((Roster, "dead_workers", everybody),),
    ),
    python("who leaves is served on", Streams, "close", close_without_cancel),
    python("a gap is not repaired", Streams, "_repair", do_nothing, WIDOWS),
)

MUTANTS += OF_THE_QUEUE + OF_CHOICES
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
