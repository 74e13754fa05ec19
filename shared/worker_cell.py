"""The objects by which a worker process touches its cell, made once per process."""

from dataclasses import dataclass

from shared.bus import RedisBus
from shared.leases import Leases
from shared.messages import Registration
from shared.process import Process
from shared.roster import Roster
from shared.worker_link import Duties, WorkerLink


@dataclass(frozen=True, slots=True)
class WorkerCell:
    """Leases, roster and bus of one worker."""

    process: Process
    leases: Leases
    roster: Roster
    bus: RedisBus

    @classmethod
    def of(cls, process: Process) -> "WorkerCell":
        """From here on an outage of Redis, however long, is a pause: what the worker holds outlives it."""
        process.link.be_patient()
        return cls(
            process,
            Leases(process.link, process.keys, process.randomness),
            Roster(process.link, process.keys, process.settings.lease.heartbeat_s),
            RedisBus(process.link, process.clock),
        )

    def link(self, registration: Registration, duties: Duties, secret: bytes | None = None) -> WorkerLink:
        """The worker's loops. See `WorkerLink`."""
        process = self.process
        return WorkerLink(
            registration,
            duties,
            self.bus,
            process.keys,
            self.leases,
            self.roster,
            process.clock,
            process.settings.lease,
            secret,
        )
