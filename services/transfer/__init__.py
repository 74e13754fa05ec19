"""Moves KV blocks from one worker to another: the reader pulls, over shared memory or tcp.

`TransferSource` offers blocks of a `Region`, `TransferReader` fetches them. `sockets` makes both over real
sockets; `services.transfer.fake` makes them in memory, for tests and simulations.
"""

from services.transfer.fetch import Fetched
from services.transfer.offers import Offer, Outcome
from services.transfer.reader import TransferReader
from services.transfer.region import Region
from services.transfer.session import Identity
from services.transfer.sockets import socket_reader, socket_source
from services.transfer.source import TransferSource
from services.transfer.stats import ReaderStats, SourceStats

__all__ = [
    "Fetched",
    "Identity",
    "Offer",
    "Outcome",
    "ReaderStats",
    "Region",
    "SourceStats",
    "TransferReader",
    "TransferSource",
    "socket_reader",
    "socket_source",
]
