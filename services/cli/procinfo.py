"""Which process a pid is. A pid alone may have been recycled; with its start time it names one process."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    start: int  # clock ticks after boot, field 22 of /proc/<pid>/stat

    @staticmethod
    def of(pid: int) -> "ProcessId | None":
        """The process that has this pid now; None if there is none, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
        return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))

    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def send(self, sig: signal.Signals) -> bool:
        """Signal this very process, never one that inherited its pid. False if it is gone."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, sig)
        except ProcessLookupError:
            return False
        return True
