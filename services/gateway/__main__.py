"""`python -m services.gateway`."""

import sys

from services.gateway.service import serve
from shared.process import run

if __name__ == "__main__":
    sys.exit(run("gateway", serve))
