"""Several choices of one prompt, and logprobs: shared blocks, copies on write, tokens as if each choice were alone."""

from random import Random

import pytest

from services.engine.fake_runner import fake_answer, fake_logprob
from services.engine.types import SeqId, SeqOutput
from shared.messages import FirstToken
from tests.unit.engine.helpers import BLOCK, Rig, make_spec


def names(name: str, choices: int) -> list[str]:
    return [name, *(f"{name}.{i}" for i in range(1, choices))]


def answers(prompt, max_tokens: int, choices: int) -> list[list[int]]:
    return [list(fake_answer(prompt, max_tokens, choice=c)) for c in range(choices)]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 9, 12])
@pytest.mark.parametrize("caching", [True, False])
def test_choices_are_what_they_were_alone(length: int, caching: bool) -> None:
    """Three choices, the prompt computed once; at the end every block is takeable."""
    rig = Rig(24, caching=caching)
    prompt = list(range(length))
    rig.planner.add(make_spec("q", prompt, 7, choices=3))
    rig.run()
    assert [rig.tokens[name] for name in names("q", 3)] == answers(prompt, 7, 3)
    assert rig.num_computed_tokens == length + 3 * 6
    assert rig.pool.takeable == rig.pool.total


def test_the_prompt_is_shared_and_its_last_block_copied_once_less_than_there_are_choices() -> None:
    """Ten tokens in blocks of four: two shared blocks, and one of its own for each choice."""
    rig = Rig(24)
    rig.planner.add(make_spec("q", range(10), 7, choices=3))
    rig.step()
    assert rig.pool.census()["held"] == 3
    plan = rig.planner.plan()
    assert plan is not None
    assert len(plan.copies) == 2
    assert len({source for source, _ in plan.copies}) == 1
    rig.note(rig.planner.commit(plan, rig.runner.run(plan)))
    rig.planner.check()
    assert rig.pool.census()["held"] == 2 + 3


def test_credit_is_shared_out_to_the_choices() -> None:
    """Nobody else gets the blocks that the choices will need, and they take no more than was promised."""
    rig = Rig(12)
    credit = 2 + 3 * 3  # shared, then ten tokens' tail and six more for each
    rig.planner.add(make_spec("q", range(10), 7, choices=3, credit=credit))
    rig.planner.add(make_spec("greedy", range(90, 94), 40))
    rig.run()
    assert rig.planner.stats().preemptions == 0 or rig.finished["greedy"]
    assert [rig.tokens[name] for name in names("q", 3)] == answers(range(10), 7, 3)


def test_a_choice_may_end_with_its_first_token() -> None:
    """The others go on, whichever it is; all of them may."""
    prompt = list(range(6))
    firsts = [fake_answer(prompt, 1, choice=c)[0] for c in range(3)]
    for ended in ({0}, {1}, {0, 2}, {0, 1, 2}):
        rig = Rig(24)
        stop = tuple(firsts[c] for c in ended)
        rig.planner.add(make_spec("q", prompt, 5, choices=3, stop=stop))
        rig.run()
        for c, name in enumerate(names("q", 3)):
            assert (rig.finished[name] == "stop") == (c in ended)
            assert len(rig.tokens[name]) == (1 if c in ended else 5)
        assert rig.pool.takeable == rig.pool.total


def test_all_first_tokens_are_handed_off_together() -> None:
    """Prefill chooses each choice's first token from the one row; decode lands once and forks."""
    prompt = list(range(10))
    source, reader = Rig(12), Rig(24)
    source.planner.add(make_spec("q", prompt, 6, choices=3, prefill_only=True, logprobs=0))
    outputs: list[SeqOutput] = []
    first: FirstToken | None = None
    while (out := source.step()) is not None:
        outputs += out.outputs
        first = next((f.last for f in out.filled if f.last), first)
    assert first is not None
    want = answers(prompt, 6, 3)
    assert (first.token_id, *first.others) == tuple(a[0] for a in want)
    assert first.logprobs == tuple(fake_logprob(a[0]) for a in want)
    assert [(o.seq_id, o.token_ids, o.logprobs) for o in outputs] == [
        (name, (a[0],), (fake_logprob(a[0]),)) for name, a in zip(names("q", 3), want, strict=True)
    ]
    source.planner.release(SeqId("q"))
    assert source.pool.takeable == source.pool.total
    spec = make_spec("q", prompt, 6, choices=3)
    held = reader.planner.reserve(spec)
    assert held is not None
    reader.write_kv(prompt, held.block_ids)
    assert reader.planner.land(spec.seq_id, first)
    reader.planner.check()
    reader.run()
    assert [reader.tokens[name] for name in names("q", 3)] == [a[1:] for a in want]


def test_landed_choices_of_which_the_first_has_ended() -> None:
    """Choice 0 ended with its first token: its siblings run."""
    prompt = list(range(7))
    want = answers(prompt, 6, 3)
    rig = Rig(24)
    spec = make_spec("q", prompt, 6, choices=3, stop=(want[0][0],))
    held = rig.planner.reserve(spec)
    assert held is not None
    rig.write_kv(prompt, held.block_ids)
    first = FirstToken(index=0, token_id=want[0][0], others=(want[1][0], want[2][0]))
    assert rig.planner.land(spec.seq_id, first)
    rig.planner.check()
    rig.run()
    assert "q" not in rig.tokens
    assert [rig.tokens[name] for name in ("q.1", "q.2")] == [a[1:] for a in want[1:]]
    assert rig.pool.takeable == rig.pool.total


@pytest.mark.parametrize("seed", range(12))
def test_choices_under_scarcity(seed: int) -> None:
    """Groups come, land, and are aborted at random in a tiny pool: what each choice says is right, and every book
    balances after every step."""
    rng = Random(seed)
    rig = Rig(rng.randint(9, 14), seqs=rng.randint(1, 6), budget=rng.randint(1, 20), caching=rng.random() < 0.7)
    wanted: dict[str, list[int]] = {}
    firsts: dict[str, int] = {}
    aborted: set[str] = set()
    for number in range(150):
        act = rng.random()
        choices, length = rng.randint(1, 4), rng.randint(1, 14)
        prompt = [rng.randint(0, 1) for _ in range(length)]
        name, max_tokens = f"s{number}", rng.randint(2, 9)
        spec = make_spec(name, prompt, max_tokens, choices=choices, credit=rng.choice([0, 4, 6, 8]))
        if act < 0.25 and len(wanted) < 200:
            rig.planner.add(spec)
            wanted.update(zip(names(name, choices), answers(prompt, max_tokens, choices), strict=True))
        elif act < 0.4:
            held = rig.planner.reserve(spec)
            if held is not None:
                rig.planner.check()
                want = answers(prompt, max_tokens, choices)
                rig.write_kv(prompt, held.block_ids, held.num_hit_blocks)
                rig.planner.land(
                    spec.seq_id, FirstToken(index=0, token_id=want[0][0], others=tuple(a[0] for a in want[1:]))
                )
                wanted.update(zip(names(name, choices), want, strict=True))
                firsts.update(dict.fromkeys(names(name, choices), 1))
        elif act < 0.5 and wanted:
            victim = rng.choice(sorted(wanted))
            rig.planner.abort(SeqId(victim))
            aborted |= {name for name in wanted if name == victim or name.startswith(f"{victim}.")}
        rig.planner.check()
        rig.step()
    rig.run(5000)
    assert rig.pool.takeable == rig.pool.total
    for name, want in wanted.items():
        got = rig.tokens.get(name, [])
        rest = want[firsts.get(name, 0) :]
        assert got == (rest[: len(got)] if name in aborted else rest), name


def test_prompt_logprobs_come_with_the_first_token_whatever_the_chunks() -> None:
    """One for each token of the prompt but the first; no prefix hit hides them, and none is told twice."""
    prompt = list(range(22))
    for budget in (1, 3, 5, 64):
        rig = Rig(24, budget=budget)
        rig.planner.add(make_spec("warm", prompt, 2))
        rig.run()
        rig.planner.add(make_spec("q", prompt, 4, prompt_logprobs=0, logprobs=0))
        outputs: list[SeqOutput] = []
        while rig.planner.has_work:
            out = rig.step()
            assert out is not None
            outputs += out.outputs
        assert outputs[0].prompt_logprobs == tuple(map(fake_logprob, prompt[1:]))
        assert not any(o.prompt_logprobs for o in outputs[1:])
        assert [o.logprobs for o in outputs] == [(fake_logprob(o.token_ids[0]),) for o in outputs]
        assert outputs[0].num_cached_tokens == 0


def test_prompt_logprobs_survive_preemption() -> None:
    """A seq that loses its blocks while its prompt is computed goes on where it was, or computes it again."""
    rig = Rig(8, budget=2)
    elder = make_spec("elder", range(4), 20)
    rig.planner.add(elder)
    rig.step()
    prompt = list(range(50, 68))
    rig.planner.add(make_spec("q", prompt, 2, prompt_logprobs=0))
    outputs: list[SeqOutput] = []
    while rig.planner.has_work:
        out = rig.step()
        assert out is not None
        outputs += [o for o in out.outputs if o.seq_id == "q"]
    assert rig.planner.stats().preemptions > 0
    assert outputs[0].prompt_logprobs == tuple(map(fake_logprob, prompt[1:]))
    assert rig.tokens["q"] == list(fake_answer(prompt, 2))


def test_a_resumed_seq_does_not_tell_the_prompt_again() -> None:
    """Its prompt's logprobs went out with the first token."""
    rig = Rig(16)
    spec = make_spec("q", range(9), 5, sent=2, prompt_logprobs=0)
    rig.planner.add(spec)
    out = rig.step()
    assert out is not None
    assert out.outputs[0].prompt_logprobs == ()
