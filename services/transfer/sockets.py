"""Puts a source and a reader together over real sockets: what a worker calls."""

from services.transfer.links import SocketDialer
from services.transfer.reader import TransferReader
from services.transfer.region import Region
from services.transfer.session import Identity
from services.transfer.socket_door import SocketDoor
from services.transfer.source import TransferSource
from services.transfer.stats import ReaderStats
from shared.clock import Clock
from shared.config import TransferConfig
from shared.offload import Offload


def socket_source(
    region: Region,
    identity: Identity,
    capability_key: bytes,
    config: TransferConfig,
    clock: Clock,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    run_dir: str = "",
    advertise: str = "",
) -> TransferSource:
    """A source that listens on `host:port` (0 = any port) and, where the memory allows it, on a unix socket in
    `run_dir` ("" = a private temporary folder). Readers are told of `advertise` ("" = host)."""
    door = SocketDoor(host, port, run_dir, f"kv-{identity.incarnation}", config, clock, advertise)
    return TransferSource(region, identity, capability_key, config, clock, door)


def socket_reader(
    region: Region, identity: Identity, config: TransferConfig, clock: Clock, offload: Offload
) -> TransferReader:
    """A reader that connects by the first of `config.transports` that works for each source."""
    stats = ReaderStats(block_bytes=region.block_bytes)
    dialer = SocketDialer(identity, region, config, stats)
    return TransferReader(region, config, clock, offload, dialer, stats)
