"""From a program's number to the tokens that it owns, for packed rows of any length."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def find_tile(query_start_loc, rows, tokens, tile, BT: tl.constexpr):
    """Row, its first and last token bound, and the tile's first token within the row.

    Row i owns the tiles from `query_start_loc[i] // BT + i` on. The next row starts at least
    `ceil(length / BT)` tiles later, so `tokens // BT + rows + 1` tiles cover every mixture of
    lengths, whatever the longest row. A tile past its row's end has nothing to do. Row `rows` is
    the pads behind the last token.
    """
    row = -1
    for at in range(0, rows + 1, 64):
        i = at + tl.arange(0, 64)
        begins = tl.load(query_start_loc + i, mask=i <= rows, other=0)
        row += tl.sum(((begins // BT + i <= tile) & (i <= rows)).to(tl.int32), 0)
    begin = tl.load(query_start_loc + row)
    end = tokens
    if row < rows:
        end = tl.load(query_start_loc + row + 1)
    return row, begin, end, (tile - begin // BT - row) * BT


@triton.jit
def tracked(track, points, row, count, at):
    """The slot that point `at` gives the state after `count` tokens of `row`; -1 for none."""
    point = track + at * 3
    mine = (tl.load(point) == row) & (tl.load(point + 1) == count)
    return tl.where(mine, tl.load(point + 2), -1).to(tl.int64)
