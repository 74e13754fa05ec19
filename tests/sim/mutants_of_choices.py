"""Planted bugs of requests for several choices, and of the hints that one of them is over. See `mutants.py`."""

from typing import Any

from services.decode.job import Job, Phase
from services.decode.worker import DecodeWorker
from services.engine.choices import Choices
from services.gateway.streams import Streams
from shared.ids import RequestId
from tests.sim.mutant import Mutant, lua, python
from tests.sim.wrong import ignore

MANY: dict[str, Any] = {"several": 0.5, "leavers": 0.0}
TROUBLE = ("bad_steps", "lost_replies")
GHOSTS = ("crash", "ghost", "ghost")

_cancel_choice = DecodeWorker.cancel_choice


def all_are_over(self: DecodeWorker, request_id: RequestId, epoch: int, choice: int) -> None:
    for every in range(4):
        _cancel_choice(self, request_id, epoch, every)


def of_any_epoch(self: DecodeWorker, request_id: RequestId, epoch: int, choice: int) -> None:
    seq_id = self._by_request.get(request_id)
    now = self._jobs[seq_id].fence.epoch if seq_id in self._jobs else epoch
    _cancel_choice(self, request_id, now, choice)


def another_is_over(self: DecodeWorker, request_id: RequestId, epoch: int, choice: int) -> None:
    _cancel_choice(self, request_id, epoch, max(0, choice - 1))


def over_before_it_began(self: DecodeWorker, job: Job) -> None:
    """Choices have no seq of their own until they part."""
    for choice in sorted(job.unwanted & set(job.choices.open)):
        job.unwanted.discard(choice)
        self._engine.abort(job.seq_ids[choice])
        if job.choices.said(choice, job.choices.num_output[choice], "stop"):
            self._finish(job)
            return


def stops_in_name(self: DecodeWorker, job: Job) -> None:
    """Written down as over, and worked on."""
    if job.phase is Phase.RUNNING and any(job.choices.num_output):
        for choice in sorted(job.unwanted & set(job.choices.open)):
            if job.choices.said(choice, job.choices.num_output[choice], "stop"):
                self._finish(job)
                return


_of = Choices.of


def all_go_on(state: Any, max_model_len: int) -> Choices:
    """Who resumes a request has no choice that was over before."""
    choices = _of(state, max_model_len)
    return choices if choices.over else Choices(choices.num_output)


OF_CHOICES: tuple[Mutant, ...] = (
    python("a hint ends all choices", DecodeWorker, "cancel_choice", all_are_over, (), **MANY),
    python("a hint ends another choice", DecodeWorker, "cancel_choice", another_is_over, (), **MANY),
    python("a hint is ignored", DecodeWorker, "cancel_choice", ignore, (), **MANY),
    python("a hint of an older attempt is believed", DecodeWorker, "cancel_choice", of_any_epoch, GHOSTS, **MANY),
    python("nobody is told that a choice is over", Streams, "stop_choice", ignore, (), **MANY),
    python("a choice is over before it has begun", DecodeWorker, "_stop_unwanted", over_before_it_began, None, **MANY),
    python("a choice that is over is worked on", DecodeWorker, "_stop_unwanted", stops_in_name, (), **MANY),
    python("choices that were over go on", Choices, "of", staticmethod(all_go_on), ("crash",), **MANY),
    lua(
        "a hint asks for no epoch",
        "cancel_choice",
        "if r[2] ~= ARGV[1] or r[3] ~= ARGV[2] then return 0 end",
        "if r[3] ~= ARGV[2] then return 0 end",
        GHOSTS,
        **MANY,
    ),
    lua(
        "a hint after the end",
        "cancel_choice",
        "if r[1] ~= 'dispatched' and r[1] ~= 'prefill' and r[1] ~= 'decode' then return 0 end",
        "",
        TROUBLE,
        **MANY,
    ),
    lua("a hint reaches nobody", "cancel_choice", "redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])", "", (), **MANY),
    lua(
        "requeue tells of one choice",
        "requeue",
        "for c = 1, others do marker",
        "for c = 1, 0 do marker",
        ("crash",),
        **MANY,
    ),
    lua(
        "the other choices' logs stay for ever",
        "complete",
        "for c = 0, (redis.call('HGET', KEYS[1], 'nc') or 1) - 1 do",
        "for c = 0, 0 do",
        (),
        **MANY,
    ),
)
