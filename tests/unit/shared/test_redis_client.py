"""Our Redis connections say what redis-py's say, and stay in step whatever is given up or breaks."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis_client import LineClient
from tests.redis_server import RedisServer
from tests.unit.shared.redis_clients import Peer, client_of, outcome, plain_of, talking

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The services' loop, and the tests'."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[LineClient]:
    client = client_of(redis_url)
    yield client
    await client.aclose()


COMMANDS: list[tuple[Any, ...]] = [
    ("SET", "a", b"\x00\xff\r\n"),
    ("GET", "a"),
    ("GET", "none"),
    ("HSET", "h", "f", 1, "g", 2.5),
    ("HGETALL", "h"),
    ("HMGET", "h", "f", "x"),
    ("LPUSH", "a", 1),
    ("NO SUCH COMMAND",),
    ("GET",),
    ("EVALSHA", "0" * 40, 0),
    ("EVAL", "return {1, {2, 'x', false}, redis.error_reply('MINE oh')}", 0),
    ("EVAL", "return redis.error_reply('MINE oh')", 0),
    ("EVAL", "return redis.call('LPUSH', 'a', 1)", 0),
    ("XADD", "s", "1-1", "m", "x", "m", "y"),
    ("XRANGE", "s", "-", "+"),
    ("XREAD", "COUNT", 5, "BLOCK", 10, "STREAMS", "s", "0-0"),
    ("XREAD", "COUNT", 5, "BLOCK", 10, "STREAMS", "s", "9-9"),
    ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">"),
    ("XACK", "s", "g", "1-1"),
    ("ZADD", "z", 1.5, "m"),
    ("ZRANGE", "z", 0, -1, "WITHSCORES"),
    ("CONFIG SET", "min-replicas-to-write", 1),
    ("SET", "a", 1),
    ("EVAL", "return redis.call('SET', 'a', 1)", 0),
    ("CONFIG SET", "min-replicas-to-write", 0),
    ("CONFIG GET", "maxmemory"),
    ("CONFIG SET", "maxmemory", 1),
    ("SET", "a", 1),
    ("EVAL", "return redis.call('SET', 'a', 1)", 0),
    ("CONFIG SET", "maxmemory", 0),
    ("AUTH", "nobody", "knows"),
    ("SCRIPT EXISTS", "0" * 40),
]


async def test_it_answers_as_redis_py_does(client: LineClient, redis_url: str):
    """Values, types of errors and their texts, of whatever our services may hear."""
    ours: list[Any] = [await outcome(lambda c=c: client.execute_command(*c)) for c in COMMANDS]
    await client.flushall()
    plain = plain_of(redis_url)
    theirs: list[Any] = [await outcome(lambda c=c: plain.execute_command(*c)) for c in COMMANDS]
    await plain.aclose()
    with_errors = [repr(answer) for answer in ours]
    assert with_errors == [repr(answer) for answer in theirs]
    assert len({kind for kind, *_ in ours}) == 5  # answers, and four kinds of errors


async def test_typed_helpers_and_batches_keep_their_types(client: LineClient):
    """A batch's answers are those of its commands, an error is raised after all of them took effect."""
    pipe = client.pipeline(transaction=False)
    pipe.set("a", 1).hset("h", "f", "v").hgetall("h").xlen("none").info("memory")
    done, added, found, length, memory = await pipe.execute()
    assert (done, added, found, length) == (True, 1, {b"f": b"v"}, 0)
    assert memory["used_memory"] > 0
    pipe.lpush("a", 1).set("b", 2)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await pipe.execute()
    assert await client.get("b") == b"2"
    assert await client.pipeline(transaction=False).execute() == []
    async with client.pipeline(transaction=True) as transaction:
        assert await transaction.incr("b").incr("b").execute() == [3, 4]


async def test_many_at_once_take_one_connection(client: LineClient):
    """Each caller gets its own answer, whatever the others asked."""
    answers: dict[int, bytes] = {}

    async def ask(i: int) -> None:
        answers[i] = await client.execute_command("ECHO", i)

    async with anyio.create_task_group() as tasks:
        for i in range(500):
            tasks.start_soon(ask, i)
    assert answers == {i: str(i).encode() for i in range(500)}
    assert len(await client.client_list()) == 1


async def test_a_call_given_up_leaves_the_others_in_step(client: LineClient):
    """The answer to a cancelled call goes to nobody, and the call takes effect."""
    for i in range(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.set, f"k{i}", i)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert await client.execute_command("ECHO", f"x{i}") == f"x{i}".encode()
    assert await client.exists(*(f"k{i}" for i in range(20))) >= 19  # the first may have been connecting still


async def test_a_waiting_read_keeps_nobody_waiting(client: LineClient):
    """Others are answered meanwhile; given up, its connection is closed; else it is used again."""
    got: list[Any] = []

    async def read(ms: int) -> None:
        got.append(await client.execute_command("XREAD", "BLOCK", ms, "STREAMS", "s", "0-0"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, 60_000)
        while "xread" not in str([one["cmd"] for one in await client.client_list()]):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    while len(await client.client_list()) > 1:
        await anyio.lowlevel.checkpoint()
    for _ in range(3):
        await read(1)
    assert got == [[], [], []]
    assert len(await client.client_list()) == 2


async def test_a_redis_that_dies_fails_all_that_wait_and_is_found_again(redis_url: str):
    """Reads that wait and calls alike; the next call connects anew."""
    server = RedisServer()
    server.start()
    client = client_of(server.url)
    errors: list[Exception] = []

    async def fail(*command: Any) -> None:
        try:
            await client.execute_command(*command)
        except RedisError as exc:
            errors.append(exc)

    try:
        await client.set("a", 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail, "XREAD", "BLOCK", 60_000, "STREAMS", "s", "0-0")
            while "xread" not in str([one["cmd"] for one in await client.client_list()]):
                await anyio.lowlevel.checkpoint()
            server.kill()
        await fail("GET", "a")
        assert [type(error) for error in errors] == [RedisConnectionError] * 2
        server.start()
        assert await client.get("a") == b"1"
    finally:
        await client.aclose()
        server.close()


# --- servers of our own -------------------------------------------------------------------------------


async def test_no_answer_in_time_ends_the_connection_for_all(tmp_path: Path):
    """Nobody waits for ever, and the late answer goes to nobody: the next call has a connection of its own."""
    connections = 0

    async def talk(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.receive()
        if connections > 1:
            await peer.send(b"+new\r\n")
        await peer.swallow()

    async with talking(tmp_path, talk) as client:
        errors: list[Exception] = []

        async def ask() -> None:
            with pytest.raises(RedisTimeoutError) as caught:
                await client.execute_command("PONG")
            errors.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
        assert len(errors) == 2
        assert connections == 1
        assert await client.execute_command("PONG") == b"new"


async def test_who_waits_for_a_connection_shares_what_comes_of_it(tmp_path: Path):
    """One attempt for all at once, whether it fails or not: nobody queues for attempts at a Redis that is away."""
    connections = 0

    async def talk(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        while connections > 1:
            await peer.send(b"+OK\r\n" * (await peer.receive()).count(b"*"))  # one for each command
        await peer.swallow()

    async with talking(tmp_path, talk, "?db=1") as client:
        outcomes: list[Any] = []

        async def ask() -> None:
            outcomes.append(await outcome(lambda: client.execute_command("PONG")))

        for i, expected in enumerate([RedisTimeoutError, "answer"]):
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(ask)
            assert [kind for kind, _ in outcomes] == [expected] * 20
            assert connections == i + 1
            outcomes.clear()


async def test_answers_in_pieces_are_answers(tmp_path: Path):
    """Byte by byte, and two in one piece."""
    both = b"*2\r\n$3\r\na\r\n\r\n:7\r\n" + b"-WRONGTYPE no\r\n"

    async def talk(peer: Peer) -> None:
        while True:
            await peer.receive()
            for i in range(len(both)):
                await peer.send(both[i : i + 1])
                await anyio.lowlevel.checkpoint()
            await peer.receive()
            await peer.send(both)

    async with talking(tmp_path, talk) as client:
        for _ in range(2):
            answers = await client.pipeline(transaction=False).get("x").get("y").execute(raise_on_error=False)
            assert answers[0] == [b"a\r\n", 7]
            assert str(answers[1]) == "WRONGTYPE no"


async def test_an_answer_that_takes_long_to_come_is_no_silence(tmp_path: Path):
    """What arrives in pieces, each in time, may take longer in all than one silence may."""

    async def talk(peer: Peer) -> None:
        await peer.receive()
        await peer.send(b"$8\r\n")
        for byte in b"answered":
            await anyio.sleep(0.05)
            await peer.send(bytes([byte]))
        await peer.send(b"\r\n")
        await peer.swallow()

    async with talking(tmp_path, talk) as client:
        assert await client.execute_command("GET", "x") == b"answered"


async def test_closing_ends_reads_that_wait(client: LineClient):
    """Lines that are in use are closed too."""
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            with pytest.raises(RedisConnectionError):
                await client.execute_command("XREAD", "BLOCK", 60_000, "STREAMS", "none", "0")

        tasks.start_soon(read)
        with anyio.fail_after(20):
            while not any(one["cmd"] == "xread" for one in await client.client_list()):
                await anyio.lowlevel.checkpoint()
        await client.aclose()


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_what_is_no_redis_is_a_broken_connection(tmp_path: Path, garbage: bytes):
    """Another protocol, or an end in place of an answer."""

    async def talk(peer: Peer) -> None:
        await peer.receive()
        if garbage:
            await peer.send(garbage)
            await peer.swallow()

    async with talking(tmp_path, talk) as client:
        with pytest.raises(RedisConnectionError):
            await client.execute_command("PONG")


async def test_an_answer_that_nobody_asked_for_goes_to_nobody(tmp_path: Path):
    """The connection is out of step, and used no more."""
    connections = 0

    async def talk(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        while True:
            await peer.receive()
            await peer.send(b"+a\r\n+b\r\n")

    async with talking(tmp_path, talk) as client:
        for i in range(3):
            assert await client.execute_command("PONG") == b"a"
            assert connections == i + 1


async def test_nobody_there_is_a_connection_error(tmp_path: Path):
    """No socket, and a port that nobody listens on."""
    for url in (f"unix://{tmp_path / 'none'}", "redis://127.0.0.1:1/0"):
        client = client_of(url)
        with pytest.raises(RedisConnectionError):
            await client.get("a")
        await client.aclose()
