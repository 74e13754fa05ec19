"""A plan as the arrays that a forward pass wants: the rows of all seqs, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from services.engine.last_tokens import NO_TOKENS
from services.engine.types import PENDING, PlanItem, SeqId

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids: Ints  # [num_rows]
    positions: Ints  # [num_rows], in the row's seq
    slot_mapping: Ints  # [num_rows]
    block_tables: Ints  # [num_seqs, max_blocks], -1 behind a table's end
    query_start: Ints  # [num_seqs + 1], first row of each seq
    context_lens: Ints  # [num_seqs], the new rows included
    logit_rows: Ints  # [num_logits], rows whose logits are wanted: of each item its targets', then the one to sample


def build_batch(items: Sequence[PlanItem], block_size: int, pending: Mapping[SeqId, int] = NO_TOKENS) -> StepBatch:
    """Lay out the items in order. Each block table must cover its item's rows.

    :param pending: what the last step sampled, by seq: for rows whose token the plan did not know.
    """
    if all(len(item.token_ids) == 1 and not item.targets for item in items):
        return _single_rows(items, block_size, pending)
    num_seqs = len(items)
    num_rows = np.fromiter((len(item.token_ids) for item in items), np.int32, num_seqs)
    starts = np.fromiter((item.start for item in items), np.int32, num_seqs)
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(num_rows, out=query_start[1:])
    total = int(query_start[-1])
    seq_of_row = np.repeat(np.arange(num_seqs, dtype=np.int32), num_rows)
    positions = np.arange(total, dtype=np.int32) - query_start[seq_of_row] + starts[seq_of_row]

    widths = np.fromiter((len(item.block_table) for item in items), np.int32, num_seqs)
    assert (widths * block_size >= starts + num_rows).all(), "a block table does not cover its rows"
    tables = np.full((num_seqs, int(widths.max())), -1, np.int32)
    flat = chain.from_iterable(item.block_table for item in items)
    tables[np.arange(tables.shape[1]) < widths[:, None]] = np.fromiter(flat, np.int32, int(widths.sum()))
    slots = tables[seq_of_row, positions // block_size] * block_size + positions % block_size

    sampled = np.fromiter((item.sample is not None for item in items), np.bool_, num_seqs)
    tokens = np.fromiter(chain.from_iterable(item.token_ids for item in items), np.int32, total)
    rows = np.flatnonzero(tokens == PENDING)
    if len(rows):
        # (0 for a seq that failed in the step before: it is over, its row is thrown away)
        tokens[rows] = [pending.get(items[seq].seq_id, 0) for seq in seq_of_row[rows].tolist()]
    return StepBatch(
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        block_tables=tables,
        query_start=query_start,
        context_lens=starts + num_rows,
        logit_rows=_logit_rows(items, query_start) if any(i.targets for i in items) else query_start[1:][sampled] - 1,
    )


def _single_rows(items: Sequence[PlanItem], block_size: int, pending: Mapping[SeqId, int]) -> StepBatch:
    """Decode rows alone, most steps by far: few array operations, as each costs more than a row's arithmetic."""
    tables = np.full((len(items), max((len(item.block_table) for item in items), default=0)), -1, np.int32)
    tokens: list[int] = []
    starts: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for row, item in enumerate(items):
        token, start, table = item.token_ids[0], item.start, item.block_table
        block, offset = divmod(start, block_size)
        assert block < len(table), "a block table does not cover its rows"
        tokens.append(pending.get(item.seq_id, 0) if token == PENDING else token)
        starts.append(start)
        slots.append(table[block] * block_size + offset)
        tables[row, : len(table)] = table
        if item.sample is not None:
            logit_rows.append(row)
    positions = np.array(starts, np.int32)
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        slot_mapping=np.array(slots, np.int32),
        block_tables=tables,
        query_start=np.arange(len(items) + 1, dtype=np.int32),
        context_lens=positions + np.int32(1),
        logit_rows=np.array(logit_rows, np.int32),
    )


def _logit_rows(items: Sequence[PlanItem], query_start: Ints) -> Ints:
    rows: list[int] = []
    for item, first, end in zip(items, query_start[:-1].tolist(), query_start[1:].tolist(), strict=True):
        rows += range(first, first + len(item.targets))
        if item.sample is not None:
            rows.append(end - 1)
    return np.array(rows, np.int32)
