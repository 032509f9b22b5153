"""Price the sums of gradients: who holds what, in which buckets, and when each of them can start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.machine import Machine, Tier
from shardwise.oracle.events import Event, Kind
from shardwise.oracle.price import tier_fields
from shardwise.plan import Mesh
from shardwise.program import Regrid, StageProgram

REDUCTION = "reduction"
# The reducer gathers so much before it starts a sum; a gradient of this size is summed where it is; what is
# larger than a piece is summed piece by piece.
BUCKET_BYTES = 25 << 20
SINGLE_BYTES = 4 << 20
PIECE_BYTES = 16 << 20
# Sums of ranks on one host go over boards of shared memory, if they are large enough and MPI carries them.
BOARDS = 2
PART_BYTES = 4 << 20
SMALLEST_BYTES = 128 << 10
MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some gradients that the same positions of all replicas hold, summed as one flat tensor.

    `number` counts the buckets of these positions, so that all of them mean the same one.
    """

    names: frozenset[str]
    nbytes: float
    positions: tuple[int, ...]
    number: int

    @property
    def gathered_bytes(self) -> float:
        """Return the bytes of the flat copy, which a single gradient does without."""
        return self.nbytes if len(self.names) > 1 else 0.0


def buckets_of(programs: list[StageProgram], mesh: Mesh) -> list[list[Bucket]]:
    """Return the buckets of every position of a replica, in the order in which backward fills them.

    Args:
        programs: one for every stage.
        mesh: where the stages are.
    """
    sizes: dict[str, int] = {}
    for program in programs:
        for op in program.ops:
            if not isinstance(op, Regrid):
                for operand, held in zip(op.layer.operands, op.reads, strict=True):
                    if held.grad and operand.source in program.parameters:
                        sizes[operand.source] = operand.spec.itemsize
    holders: dict[tuple[str, object], set[int]] = {}
    mine: list[dict[str, tuple[int, object]]] = [{} for _ in range(mesh.positions)]
    for stage in reversed(range(mesh.stages)):
        for direction in mesh.directions:
            for member, position in enumerate(mesh.member_positions(stage, direction)):
                for name in reversed(programs[stage].parameters):
                    if name in sizes:
                        box = programs[stage].parameters[name].box(member)
                        holders.setdefault((name, box), set()).add(position)
                        mine[position].setdefault(name, (stage, box))
    kept: dict[tuple[str, object], tuple[int, ...]] = {k: tuple(sorted(v)) for k, v in holders.items()}
    return [_fill(boxes, kept, sizes, mesh.data) for boxes in mine]


def _fill(
    boxes: dict[str, tuple[int, object]],
    holders: dict[tuple[str, object], tuple[int, ...]],
    sizes: dict[str, int],
    replicas: int,
) -> list[Bucket]:
    filling: dict[tuple[int, ...], tuple[list[str], int]] = {}
    closed: Counter[tuple[int, ...]] = Counter()
    result: list[Bucket] = []

    def close(positions: tuple[int, ...], names: list[str], total: int) -> None:
        result.append(Bucket(frozenset(names), total, positions, closed[positions]))
        closed[positions] += 1

    current = -1
    for name, (stage, box) in boxes.items():
        if stage != current:
            # The gradients of one stage never wait for those of another.
            for positions, rest in filling.items():
                close(positions, *rest)
            filling, current = {}, stage
        positions = holders[name, box]
        nbytes = getattr(box, "size", 0) * sizes[name]
        if len(positions) * replicas < 2 or not nbytes:
            continue
        if nbytes >= SINGLE_BYTES:
            close(positions, [name], nbytes)
            continue
        names, total = filling.pop(positions, ([], 0))
        filling[positions] = ([*names, name], total + nbytes)
        if total + nbytes >= BUCKET_BYTES:
            close(positions, *filling.pop(positions))
    for positions, rest in filling.items():
        close(positions, *rest)
    return result


def shelf_bytes(buckets: Iterable[Bucket], mesh: Mesh, machine: Machine) -> float:
    """Return one rank's part of the shared memory in which its buckets are added up."""
    if machine.transport != "mpi4py" or not machine.device.host:
        return 0.0
    parts: dict[tuple[int, ...], float] = {}
    per_node = max(machine.node.devices, machine.crowd)
    for bucket in buckets:
        ranks = [mesh.world_rank(r, p) for r in range(mesh.data) for p in bucket.positions]
        together = len(ranks) <= MOST_RANKS and len({rank // per_node for rank in ranks}) == 1
        if together and bucket.nbytes >= SMALLEST_BYTES:
            size = min(float(PART_BYTES), bucket.nbytes)
            parts[bucket.positions] = max(size, parts.get(bucket.positions, 0.0))
    return BOARDS * sum(parts.values())


def tier_of(bucket: Bucket, mesh: Mesh, machine: Machine) -> Tier:
    """Return the tier that a sum crosses."""
    ends = [mesh.world_rank(r, p) for r in (0, mesh.data - 1) for p in bucket.positions]
    return machine.tier(ends)


def reduce_seconds(bucket: Bucket, mesh: Mesh, machine: Machine, flows: int) -> float:
    """Return how long a sum takes when `flows` of them leave a node at once."""
    count = len(bucket.positions) * mesh.data
    tier = tier_of(bucket, mesh, machine)
    whole, rest = divmod(bucket.nbytes, PIECE_BYTES)
    sizes = [*[float(PIECE_BYTES)] * int(whole), *([rest] if rest else [])]
    return sum(machine.sum_seconds(tier, count, size, flows, many=True) for size in sizes)


def launch_and_wait(
    bucket: Bucket, mesh: Mesh, machine: Machine, flows: int, replicas: int, fields: set[str]
) -> tuple[Event, Event]:
    """Return the start of a sum and the wait for it; replicas that are not simulated are not waited for."""
    tier = tier_of(bucket, mesh, machine)
    fields |= tier_fields(tier)
    seconds = reduce_seconds(bucket, mesh, machine, flows)
    device = machine.device
    copy = 2 * bucket.gathered_bytes / device.memory_bandwidth
    copy += len(bucket.names) * device.overhead_gradient_seconds
    peers = tuple(mesh.world_rank(r, p) for r in range(replicas) for p in bucket.positions)
    key = (REDUCTION, bucket.number, bucket.positions)
    launch = Event(
        Kind.LAUNCH,
        copy,
        REDUCTION,
        "gradients",
        key,
        peers,
        flight=seconds * tier.overlap,
        line=(REDUCTION, bucket.positions),
        taken=seconds,
    )
    return launch, Event(Kind.WAIT, seconds * (1 - tier.overlap), REDUCTION, "gradients", key)
