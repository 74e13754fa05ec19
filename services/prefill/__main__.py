"""`python -m services.prefill`."""

import sys

from services.prefill.service import serve
from shared.process import run

if __name__ == "__main__":
    sys.exit(run("prefill", serve))
