"""A plan as the arrays that a forward pass wants: the rows of all seqs, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from services.engine.types import PlanItem


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows], in the row's seq
    slot_mapping: torch.Tensor  # int32 [num_rows]
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks], -1 behind a table's end
    query_start: torch.Tensor  # int32 [num_seqs + 1], first row of each seq
    context_lens: torch.Tensor  # int32 [num_seqs], the new rows included
    logit_rows: torch.Tensor  # int64 [num_samples], rows whose logits are wanted


def build_batch(items: Sequence[PlanItem], block_size: int) -> StepBatch:
    """Lay out the items in order. Each block table must cover its item's rows."""
    num_seqs = len(items)
    num_rows = np.fromiter((len(item.token_ids) for item in items), np.int32, num_seqs)
    starts = np.fromiter((item.start for item in items), np.int32, num_seqs)
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(num_rows, out=query_start[1:])
    total = int(query_start[-1])
    seq_of_row = np.repeat(np.arange(num_seqs), num_rows)
    positions = np.arange(total) - query_start[seq_of_row] + starts[seq_of_row]

    widths = np.fromiter((len(item.block_table) for item in items), np.int32, num_seqs)
    assert (widths * block_size >= starts + num_rows).all(), "a block table does not cover its rows"
    tables = np.full((num_seqs, int(widths.max())), -1, np.int32)
    flat = chain.from_iterable(item.block_table for item in items)
    tables[np.arange(tables.shape[1]) < widths[:, None]] = np.fromiter(flat, np.int32, int(widths.sum()))
    slots = tables[seq_of_row, positions // block_size] * block_size + positions % block_size

    sampled = np.fromiter((item.sample is not None for item in items), np.bool_, num_seqs)
    tokens = np.fromiter(chain.from_iterable(item.token_ids for item in items), np.int64, total)
    return StepBatch(
        token_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        query_start=torch.from_numpy(query_start),
        context_lens=torch.from_numpy(starts + num_rows),
        logit_rows=torch.from_numpy(query_start[1:][sampled].astype(np.int64) - 1),
    )
