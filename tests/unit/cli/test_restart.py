"""When a dead service is started again."""

from services.cli.restart import CONFIG_ERROR, Record, RestartPolicy, after_death

POLICY = RestartPolicy(steady_s=10, first_delay_s=1, max_delay_s=4, max_deaths=5, max_deaths_starting=3)


def deaths(record: Record, *lives: float, code: int = 1) -> list[float | None]:
    delays: list[float | None] = []
    for life_s in lives:
        record, delay = after_death(POLICY, record, life_s=life_s, code=code)
        delays.append(delay)
    return delays


def test_delays_double_up_to_a_limit_and_then_it_gives_up():
    """Fast deaths one after another."""
    assert deaths(Record(was_ready=True), 1, 1, 1, 1, 1) == [1, 2, 4, 4, None]


def test_a_steady_life_clears_the_record():
    """A service that ran well for long is new again."""
    assert deaths(Record(was_ready=True), 1, 1, 1, 11, 1) == [1, 2, 4, 1, 2]


def test_a_service_that_was_never_ready_is_given_up_sooner():
    """At the first start nobody should wait for long to hear what is wrong."""
    assert deaths(Record(), 1, 1, 1) == [1, 2, None]


def test_a_wrong_configuration_is_not_tried_again():
    """The exit code says that another start would end the same way."""
    assert deaths(Record(was_ready=True), 1000, code=CONFIG_ERROR) == [None]
