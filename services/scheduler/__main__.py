"""`python -m services.scheduler`."""

import sys

from services.scheduler.service import serve
from shared.process import run

if __name__ == "__main__":
    sys.exit(run("scheduler", serve))
