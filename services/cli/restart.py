"""When a dead service is started again, and when that is given up. Pure."""

from dataclasses import dataclass, replace

CONFIG_ERROR = 2
"""Exit code of a service whose configuration is wrong (shared/process.py): starting it again cannot help."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    steady_s: float = 30.0  # a life this long clears the record, once the service has been ready
    first_delay_s: float = 0.25
    max_delay_s: float = 8.0
    max_deaths: int = 6  # in a row, none of the lives being steady
    max_deaths_starting: int = 3  # the same for a service that has never been ready


@dataclass(frozen=True, slots=True)
class Record:
    """A service's recent past."""

    deaths: int = 0  # in a row
    was_ready: bool = False


def after_death(policy: RestartPolicy, record: Record, *, life_s: float, code: int) -> tuple[Record, float | None]:
    """The new record, and seconds until the next start; None: give up.

    :param life_s: seconds from the last start to the death.
    :param code: exit code; negative for a signal.
    """
    deaths = 1 if life_s >= policy.steady_s and record.was_ready else record.deaths + 1
    record = replace(record, deaths=deaths)
    limit = policy.max_deaths if record.was_ready else policy.max_deaths_starting
    if code == CONFIG_ERROR or deaths >= limit:
        return record, None
    return record, min(policy.max_delay_s, policy.first_delay_s * 2 ** (deaths - 1))
