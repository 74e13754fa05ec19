"""Submissions that ended badly are kept, and can be made again."""

import pytest

from shared.dead_letters import DeadLetters, QueueState
from shared.submissions import MAX_DEAD, End
from tests.unit.gateway.scripts_world import KEYS, A, Queue

pytestmark = pytest.mark.anyio


async def test_a_dead_letter_is_listed_and_submitted_again(queue: Queue) -> None:
    """With its reason and all its fields; the id is free again, and the old result gone."""
    a, letters = queue.gateway(A), DeadLetters(queue.link, KEYS)
    s = await queue.taken(a, reply=KEYS.replies("x"), endpoint="chat", other="dropped")
    await queue.submit("waits")
    assert await letters.state() == QueueState(waiting=1, open=1, dead=0)
    assert await a.end(s, End(500, "error", b'{"error":1}', dead="three attempts"))
    assert await letters.state() == QueueState(waiting=1, open=0, dead=1)
    (letter,) = await letters.latest()
    assert (letter.id, letter.reason, letter.entry) == ("job", "three attempts", s.entry)
    assert dict(letter.fields) == dict(s.raw)
    assert b"other" not in dict(letter.fields)
    assert (await letters.last_of_result("job"))["error"] == '{"error":1}'
    for name in ("job", s.entry, letter.letter):
        assert await letters.find(name) == letter
    entry = await letters.retry(letter)
    assert await letters.retry(letter) == "gone"
    assert await letters.last_of_result("job") == {}
    read = {x.id: x for x in await a.read(10, 1)}
    assert read["job"].entry == entry
    assert read["job"].raw == s.raw
    progress = await a.open(read["job"])
    assert progress is not None
    assert progress.tokens == {}


async def test_a_letter_is_not_retried_over_work_of_the_same_id(queue: Queue) -> None:
    """The client was faster."""
    a, letters = queue.gateway(A), DeadLetters(queue.link, KEYS)
    s = await queue.taken(a)
    await a.end(s, End(500, "error", b"{}", dead="broken"))
    await queue.link.client.delete(KEYS.submission("job"))  # its time is over
    await queue.taken(a)
    (letter,) = await letters.latest()
    assert await letters.retry(letter) == "open"
    assert len(await letters.latest()) == 1


async def test_an_error_of_the_client_is_no_dead_letter(queue: Queue) -> None:
    """It has its answer."""
    a = queue.gateway(A)
    s = await queue.taken(a)
    assert await a.end(s, End(400, "error", b"{}"))
    assert await DeadLetters(queue.link, KEYS).latest() == []
    assert MAX_DEAD > 0
