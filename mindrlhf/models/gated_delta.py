"""The gated delta rule on packed rows, by plain operators: Yang et al. 2024, arXiv:2412.06464, section 3.3.

The state of a head decays and learns by turns, S <- exp(g) S, S <- S + b k (v - S' k)', and answers S' q. Rows are
computed in chunks of 64 tokens, all at once: within a chunk tokens meet by matrix products (the WY form), a chunk is
the map X -> M X + N of states, and maps are composed 1, 2, 4, .. at a time.

A token's ancestors are the tokens before it in its segment and those of the segment that its own continues. Two states
go from chunk to chunk where prompts are shared, one above the other: of the segment that is open, and of the last one
that continues none. Decays are sums of logarithms over ancestors, so that no exponential is above 1.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindrlhf.specs import CHUNK_TOKENS

# A series of powers is exact for a block of as many rows, and its terms stay small; of 64 rows of keys that are alike
# they would reach 1e18.
_BLOCK = 8


def softplus(rows):
    """log(1 + exp(rows)). Operators of log1p compute log(1 + x), which of small x, slow decays, keeps few digits: so by
    the series of 2 artanh(x / (2 + x)).
    """
    small = ops.exp(-ops.abs(rows))
    ratio = small / (2.0 + small)  # at most 1/3
    square, series = ratio * ratio, 1.0 / 13.0
    for odd in (11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / odd
    return ops.relu(rows) + 2.0 * ratio * series


def decayed(logarithms):
    """exp of logarithms up to 0, to 5e-8. MindSpore's exponential on a CPU is up to 2e-6 off there."""
    return ops.expm1(logarithms) + 1.0


class Ancestors(nn.Cell):
    """Relations of the tokens of packed rows, the same in all layers; see :meth:`construct`.

    Args:
        conv_width: tokens that a causal convolution sees.
    """

    def __init__(self, conv_width: int):
        super().__init__(auto_prefix=False)
        self.conv_width = conv_width
        self.lower = Tensor(np.tril(np.ones((CHUNK_TOKENS, CHUNK_TOKENS), np.float32)))

    def construct(self, segments, continued, shares_prompts: bool):
        """Return what chunks and convolutions ask for.

        Args:
            segments: `[B, S]`, int32.
            continued: `[B, S]`, int32: the segment that a token's own continues, its own where it continues none.
            shares_prompts: false where none is continued.

        Returns:
            Flags of 0 and 1, float32, of the C chunks of the rows, n = C * B, the rows' first chunks before others:
            ancestors `[n, 64, 64]`; tokens that take over the open state, or the prompt's `[n, 64, 2]`; tokens that are
            in the state, or the prompt's, behind the chunk `[n, 64, 2]`; whether the prompt's state lives on
            `[n, 1, 1]`. Where no prompts are shared the pairs are of the open state alone, `[n, 64, 1]`. And the rows
            of the last ancestors of each token `[B*S, width - 1]`, counted from 1, 0 for none.
        """
        own, other = self._chunks(segments), self._chunks(continued)  # [C, B, 64]
        own_column, other_column = ops.expand_dims(own, -1), ops.expand_dims(other, -1)
        own_row = ops.expand_dims(own, -2)
        related = ops.logical_or(ops.equal(own_column, own_row), ops.equal(other_column, own_row))
        ancestors = ops.cast(related, ms.float32) * self.lower
        # The segment that was open before a chunk, and the one that it continues; none before the first.
        none = ops.fill(ms.int32, (1, own.shape[1], 1), -1)
        last, last_other = own[:, :, CHUNK_TOKENS - 1 :], other[:, :, CHUNK_TOKENS - 1 :]
        open_before, prompt_before = ops.concat((none, last[:-1]), 0), ops.concat((none, last_other[:-1]), 0)
        goes_on = ops.cast(ops.equal(own, open_before), ms.float32)
        is_known = ops.logical_or(ops.equal(other, open_before), ops.equal(other, prompt_before))
        begins = ops.cast(ops.logical_and(is_known, ops.not_equal(other, own)), ms.float32) * (1.0 - goes_on)
        in_prompt = ops.cast(ops.equal(own, last_other), ms.float32)
        in_state = ops.maximum(ops.cast(ops.equal(own, last), ms.float32), in_prompt)
        lives_on = ops.logical_or(ops.equal(last_other, open_before), ops.equal(last_other, prompt_before))
        count = own.shape[0] * own.shape[1]
        takes, leaves = (goes_on,), (in_state,)
        if shares_prompts:
            takes, leaves = (goes_on, begins), (in_state, in_prompt)
        relations = (
            ops.reshape(ancestors, (count, CHUNK_TOKENS, CHUNK_TOKENS)),
            ops.reshape(ops.stack(takes, -1), (count, CHUNK_TOKENS, -1)),
            ops.reshape(ops.stack(leaves, -1), (count, CHUNK_TOKENS, -1)),
            ops.reshape(ops.cast(lives_on, ms.float32), (count, 1, 1)),
        )
        return relations, self._rows(segments, continued, shares_prompts)

    def _chunks(self, ids):
        batch, length = ids.shape
        if length % CHUNK_TOKENS:
            ids = ops.concat((ids, ops.fill(ms.int32, (batch, -length % CHUNK_TOKENS), -2)), 1)
        return ops.transpose(ops.reshape(ids, (batch, -1, CHUNK_TOKENS)), (1, 0, 2))

    def _rows(self, segments, continued, shares_prompts):
        batch, length = segments.shape
        places = ops.reshape(ops.arange(batch * length, dtype=ms.int32), (batch, length))
        none = ops.fill(ms.int32, (batch, 1), -1)
        is_first = ops.not_equal(segments, ops.concat((none, segments[:, :-1]), 1))
        before = places  # of a token's parent, counted from 1
        if shares_prompts:
            # The last token so far of a segment that continues none, by doubling.
            ends = ops.where(ops.equal(segments, continued), places + 1, 0)
            step = 1
            while step < length:
                ends = ops.maximum(ends, ops.concat((ops.fill(ms.int32, (batch, step), 0), ends[:, :-step]), 1))
                step *= 2
            flat = ops.concat((ops.fill(ms.int32, (1,), -1), ops.reshape(segments, (-1,))), 0)
            is_prompt = ops.equal(ops.gather(flat, ends, 0), continued)
            is_prompt = ops.logical_and(is_prompt, ops.not_equal(segments, continued))
            first = ops.where(is_prompt, ends, 0)
        else:
            first = ops.fill(ms.int32, (batch, length), 0)
        parents = ops.reshape(ops.where(is_first, first, before), (-1,))
        of_row = ops.concat((ops.fill(ms.int32, (1,), 0), parents), 0)
        found = (parents,)
        for _ in range(self.conv_width - 2):
            found = (*found, ops.gather(of_row, found[-1], 0))
        return ops.stack(found, -1)


class CausalConvolution(nn.Cell):
    """silu of each channel's convolution with what a token's ancestors have there; it keeps its inputs alone.

    Rows `[N, channels]`, taps `[channels, 1, width]` with the newest last, ancestors `[N, width - 1]` of
    :class:`Ancestors`.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.add_up, self.zeros, self.stack = ops.UnsortedSegmentSum(), ops.Zeros(), ops.Stack(-1)

    def construct(self, rows, taps, ancestors):
        total = self._total(rows, taps, ancestors)
        return total * ops.sigmoid(total)

    def bprop(self, rows, taps, ancestors, out, dout):
        total = self._total(rows, taps, ancestors)
        share = ops.sigmoid(total)
        dtotal = dout * (share + total * share * (1.0 - share))
        padded, width = self._padded(rows), taps.shape[-1]
        drows = dtotal * taps[:, 0, width - 1]
        dtaps = (ops.sum(dtotal * rows, 0),)
        for back in range(1, width):
            places = ancestors[:, back - 1]
            dtaps = (ops.sum(dtotal * ops.gather(padded, places, 0), 0), *dtaps)
            drows = drows + self.add_up(dtotal * taps[:, 0, width - 1 - back], places, rows.shape[0] + 1)[1:]
        return drows, ops.reshape(self.stack(dtaps), taps.shape), ancestors

    def _total(self, rows, taps, ancestors):
        padded, width = self._padded(rows), taps.shape[-1]
        total = rows * taps[:, 0, width - 1]
        for back in range(1, width):
            total = total + ops.gather(padded, ancestors[:, back - 1], 0) * taps[:, 0, width - 1 - back]
        return total

    def _padded(self, rows):
        return ops.concat((self.zeros((1, rows.shape[1]), rows.dtype), rows), 0)


class UnitLowerInverse(nn.Cell):
    """(I + L)^-1 of strictly lower matrices `[n, 64, 64]`: of the blocks of 8 in their diagonal, which grow by merging.

    Of X, the inverse of blocks in the diagonal, and C, what is below them in blocks twice as large, that of the larger
    ones is X - X C X.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.matmul = ops.BatchMatMul()
        row, column = np.indices((CHUNK_TOKENS, CHUNK_TOKENS))
        below, of_blocks, size = row > column, row // _BLOCK == column // _BLOCK, _BLOCK
        self.in_blocks = _flags(below & of_blocks)
        self.identity, self.merged = Tensor(np.eye(CHUNK_TOKENS, dtype=np.float32)), ()
        while size < CHUNK_TOKENS:
            size *= 2
            larger = row // size == column // size
            self.merged += (_flags(below & larger & ~of_blocks),)
            of_blocks = larger

    def construct(self, lower):
        power = lower * -self.in_blocks
        inverse = self.identity + power
        for _ in range(2):  # powers up to the seventh; the eighth is 0
            power = self.matmul(power, power)
            inverse = inverse + self.matmul(inverse, power)
        for corners in self.merged:
            inverse = inverse - self.matmul(self.matmul(inverse, lower * corners), inverse)
        return inverse


def _flags(places: np.ndarray) -> Tensor:
    return Tensor(places.astype(np.float32))


class GatedDeltaRule(nn.Cell):
    """Outputs `[B, S, H, dv]`; the backward pass is written, and keeps the inputs, the states before chunks, and the
    inverses, a quarter as large.

    Below, N = C * B * H chunks of heads; k is dk, or 2 dk where there are two states.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.inverse = UnitLowerInverse()
        # Operators as objects: functions that make them may not be called in a backward pass that is written.
        self.tile, self.zeros, self.ones, self.eye = ops.Tile(), ops.Zeros(), ops.Ones(), ops.Eye()
        # Slices of columns are eight times slower on a CPU.
        self.split = ops.auto_generate.SplitWithSize()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.matmul = ops.BatchMatMul()
        self.matmul_transpose_a = ops.BatchMatMul(transpose_a=True)
        self.matmul_transpose_b = ops.BatchMatMul(transpose_b=True)
        self.strictly_lower = _flags(np.tri(CHUNK_TOKENS, k=-1))

    def construct(self, query, key, value, decay, rate, relations):
        """Return the outputs, the states before each chunk `[N, k, dv]`, and the chunks' inverses `[N, 64, 64]`.

        Args:
            query, key: `[B, S, G, dk]` of length 1, queries scaled; each of H / G heads of values in turn shares one.
            value: `[B, S, H, dv]`.
            decay: `[B, S, H]`, logarithms of what is left of the state, at most 0.
            rate: `[B, S, H]`, from 0 to 1.
            relations: of :class:`Ancestors`.
        """
        tokens = self._tokens(query, key, value, decay, rate)
        pairs, new, reads, asks, within, writes, made_of = self._products(tokens, relations)
        size = query.shape[0] * value.shape[2]
        maps = self._kept(relations, tokens, pairs[1]) - self.matmul_transpose_a(writes, reads)
        states = self._composed(maps, self.matmul_transpose_a(writes, new), size, 1)
        states = self._shifted(states, size, 1)
        fresh = new - self.matmul(reads, states)
        outputs = self.matmul(asks, states) + self.matmul(within, fresh)
        return self._by_row(outputs, value.shape), states, made_of[-2]

    def bprop(self, query, key, value, decay, rate, relations, out, dout):
        states, size = out[1], query.shape[0] * value.shape[2]
        tokens = self._tokens(query, key, value, decay, rate)
        products = self._products(tokens, relations, out[2])
        pairs, new, reads, asks, within, writes = products[:6]
        doutput = self._by_chunk(dout[0])
        dfresh = self.matmul_transpose_a(within, doutput)
        maps = self._kept(relations, tokens, pairs[1]) - self.matmul_transpose_a(writes, reads)
        dstates = self.matmul_transpose_a(asks, doutput) - self.matmul_transpose_a(reads, dfresh)
        dstates = self._composed(ops.transpose(maps, (0, 2, 1)), dstates, size, -1)
        dstates = self._shifted(dstates, size, -1)  # of the states behind each chunk
        fresh = new - self.matmul(reads, states)
        dfresh = dfresh + self.matmul(writes, dstates)
        dsolved = ops.concat((dfresh, -self.matmul_transpose_b(dfresh, states)), -1)
        dproducts = (
            dsolved,
            self.matmul_transpose_b(doutput, states),
            self.matmul_transpose_b(doutput, fresh),
            self.matmul_transpose_b(fresh, dstates),
        )
        dkept = self._slopes_of_kept(relations, states, dstates, value.shape[2])
        dtokens = self._slopes_of_tokens(tokens, products, dproducts, dkept)
        dquery, dkey, dvalue, ddecay, drate = dtokens
        dquery, dkey = (
            self._of_shared(self._by_row(one, (*value.shape[:3], -1)), query.shape) for one in (dquery, dkey)
        )
        ddecay, drate = (ops.reshape(self._by_row(one, (*rate.shape, 1)), rate.shape) for one in (ddecay, drate))
        return dquery, dkey, self._by_row(dvalue, value.shape), ddecay, drate, relations

    def _composed(self, maps, added, size: int, direction: int):
        """States behind each chunk, of maps in order; with ``direction`` -1 from the last to the first."""
        reach = size
        while reach < maps.shape[0]:
            if direction > 0:
                first_maps, near_maps, far_maps = maps[:reach], maps[reach:], maps[:-reach]
                first, near, far = added[:reach], added[reach:], added[:-reach]
            else:
                first_maps, near_maps, far_maps = maps[-reach:], maps[:-reach], maps[reach:]
                first, near, far = added[-reach:], added[:-reach], added[reach:]
            near, near_maps = near + self.matmul(near_maps, far), self.matmul(near_maps, far_maps)
            added = ops.concat((first, near) if direction > 0 else (near, first), 0)
            maps = ops.concat((first_maps, near_maps) if direction > 0 else (near_maps, first_maps), 0)
            reach *= 2
        return added

    def _shifted(self, states, size: int, direction: int):
        zeros = states[:size] * 0.0
        if states.shape[0] == size:
            return zeros
        return ops.concat((zeros, states[:-size]), 0) if direction > 0 else ops.concat((states[size:], zeros), 0)

    def _tokens(self, query, key, value, decay, rate):
        """Inputs by chunk of a head of values, `[N, 64, d]`."""
        times = value.shape[2] // query.shape[2]
        query, key = self._by_chunk(self._repeated(query, times)), self._by_chunk(self._repeated(key, times))
        decay, rate = self._by_chunk(ops.expand_dims(decay, -1)), self._by_chunk(ops.expand_dims(rate, -1))
        return query, key, self._by_chunk(value), decay, rate

    def _products(self, tokens, relations, inverse=None):
        """Of each chunk: decays on the way, `way` `[N, 64, 1]` from the first ancestor and to the chunk's end;
        values `[N, 64, dv]` and what states add to them `[N, 64, k]`; what of states is answered, and of values
        `[N, 64, 64]`; what of values is written to states `[N, 64, k]`; and what these are made of.
        """
        query, key, value, decay, rate = tokens
        heads = query.shape[0] // relations[0].shape[0]
        rows, takes, leaves = (self._of_heads(relations[place], heads) for place in range(3))
        way = self.matmul(rows, decay)
        pairs = decayed(ops.minimum(way - ops.transpose(way, (0, 2, 1)), 0.0)) * rows
        scaled = key * rate
        lower = self.matmul_transpose_b(scaled, key) * pairs * self.strictly_lower
        within = self.matmul_transpose_b(query, key) * pairs
        taken = decayed(way) * takes  # [N, 64, 1 or 2], of the open segment and its prompt
        ends = (way[:, CHUNK_TOKENS - 1 :],)
        if takes.shape[-1] == 2:
            ends = (*ends, self.matmul_transpose_a(leaves[:, :, 1:], decay))
        ends = ops.concat(ends, -1)  # [N, 1, 1 or 2]
        left = decayed(ops.minimum(ends - way, 0.0)) * leaves
        inverse = self.inverse(lower) if inverse is None else inverse
        solved = self.matmul(inverse, ops.concat((value * rate, self._by_state(scaled, taken)), -1))
        new, reads = self._columns(solved, value)
        asks, writes = self._by_state(query, taken), self._by_state(key, left)
        made_of = rows, leaves, pairs, scaled, lower, taken, left, inverse, solved
        return (way, ends), new, reads, asks, within, writes, made_of

    def _slopes_of_tokens(self, tokens, products, dproducts, dkept):
        """Slopes of the inputs by chunk, from those of the products and of the decays of states."""
        query, key, value, decay, rate = tokens
        ends, within = products[0][1], products[4]
        rows, leaves, pairs, scaled, lower, taken, left, inverse, solved = products[6]
        dsolved, dasks, dwithin, dwrites = dproducts
        dright = self.matmul_transpose_a(inverse, dsolved)
        dlower = self.matmul_transpose_b(dright, solved) * -self.strictly_lower
        dvalue, dreads = self._columns(dright, value)
        of_lower, of_within = dlower * pairs, dwithin * pairs
        dquery = self.matmul(of_within, key)
        dkey = self.matmul_transpose_a(of_within, query) + self.matmul_transpose_a(of_lower, scaled)
        dscaled = self.matmul(of_lower, key)
        on_the_way = dlower * lower + dwithin * within
        # A decay is felt between tokens before it and those from it on: their sums lose nothing, as differences would.
        before = rows * self.strictly_lower
        ddecay = self._sums(self.matmul_transpose_a(rows, on_the_way) * before)
        dends, dway = dkept * decayed(ends), decay * 0.0
        by_state = tuple(self._columns(one, key) for one in (dreads, dasks, dwrites))
        for state in range(taken.shape[-1]):
            dread, dask, dwrite = by_state[0][state], by_state[1][state], by_state[2][state]
            of_taken, of_left = taken[:, :, state : state + 1], left[:, :, state : state + 1]
            dquery, dscaled, dkey = dquery + dask * of_taken, dscaled + dread * of_taken, dkey + dwrite * of_left
            dway = dway + self._sums(dread * scaled + dask * query) * of_taken
            dend = dends[:, :, state : state + 1] + self.matmul(before, self._sums(dwrite * key) * of_left)
            ddecay = ddecay + leaves[:, :, state : state + 1] * dend
        ddecay = ddecay + self.matmul_transpose_a(rows, dway)
        drate = self._sums(dvalue * value) + self._sums(dscaled * key)
        return dquery, dkey + dscaled * rate, dvalue * rate, ddecay, drate

    def _slopes_of_kept(self, relations, states, dstates, heads: int):
        """Slopes `[N, 1, 1 or 2]` of what decays leave of states."""
        last = self._of_heads(relations[1][:, CHUNK_TOKENS - 1 :], heads)
        if last.shape[-1] == 1:
            return self._dot(dstates, states) * last
        width, lives_on = states.shape[1] // 2, self._of_heads(relations[3], heads)
        (dopen, dprompt), (opened, prompt) = (self.split(one, (width, width), 1) for one in (dstates, states))
        slope = self._dot(dopen, opened) * last[:, :, :1] + self._dot(dopen, prompt) * last[:, :, 1:]
        return ops.concat((slope, self._dot(dprompt, prompt) * lives_on), -1)

    def _kept(self, relations, tokens, ends):
        """Remainders of states after decay, `[N, k, k]`: the open one's is the prompt's where a response begins."""
        heads = ends.shape[0] // relations[0].shape[0]
        last, width = self._of_heads(relations[1][:, CHUNK_TOKENS - 1 :], heads), tokens[1].shape[-1]
        identity, left = self.eye(width, width, ms.float32), decayed(ends)
        kept = identity * (left[:, :, :1] * last[:, :, :1])
        if last.shape[-1] == 1:
            return kept
        top = ops.concat((kept, identity * (left[:, :, :1] * last[:, :, 1:])), -1)
        prompt = identity * (left[:, :, 1:] * self._of_heads(relations[3], heads))
        return ops.concat((top, ops.concat((prompt * 0.0, prompt), -1)), -2)

    def _columns(self, rows, first):
        """As many columns as ``first`` has, and the others, if any."""
        width, others = first.shape[-1], rows.shape[-1] - first.shape[-1]
        return self.split(rows, (width, others), 2) if others else (rows,)

    def _by_state(self, rows, factors):
        if factors.shape[-1] == 1:
            return rows * factors
        return ops.concat((rows * factors[:, :, :1], rows * factors[:, :, 1:]), -1)

    def _dot(self, first, second):
        count = first.shape[0]
        return self.matmul(ops.reshape(first, (count, 1, -1)), ops.reshape(second, (count, -1, 1)))

    def _sums(self, rows):
        """Sums of rows, by a product: four times as fast as ReduceSum on a CPU."""
        return self.matmul(rows, self.ones((rows.shape[0], rows.shape[2], 1), rows.dtype))

    def _by_chunk(self, rows):
        """`[B, S, H, d]` as `[N, 64, d]`, with zeros behind the end of rows."""
        batch, length, heads, width = rows.shape
        if length % CHUNK_TOKENS:
            rows = ops.concat((rows, self.zeros((batch, -length % CHUNK_TOKENS, heads, width), rows.dtype)), 1)
        rows = ops.reshape(rows, (batch, -1, CHUNK_TOKENS, heads, width))
        return ops.reshape(ops.transpose(rows, (1, 0, 3, 2, 4)), (-1, CHUNK_TOKENS, width))

    def _by_row(self, chunks, shape):
        batch, length, heads, width = shape
        width = chunks.shape[-1] if width == -1 else width
        chunks = ops.reshape(chunks, (-1, batch, heads, CHUNK_TOKENS, width))
        rows = ops.reshape(ops.transpose(chunks, (1, 0, 3, 2, 4)), (batch, -1, heads, width))
        return self.split(rows, (length, -length % CHUNK_TOKENS), 1)[0] if length % CHUNK_TOKENS else rows

    def _of_heads(self, flags, heads: int):
        count, rows, columns = flags.shape
        repeated = self.tile(ops.reshape(flags, (count, 1, rows, columns)), (1, heads, 1, 1))
        return ops.reshape(repeated, (count * heads, rows, columns))

    def _repeated(self, rows, times: int):
        if times == 1:
            return rows
        batch, length, heads, width = rows.shape
        rows = self.tile(ops.reshape(rows, (batch, length, heads, 1, width)), (1, 1, 1, times, 1))
        return ops.reshape(rows, (batch, length, heads * times, width))

    def _of_shared(self, slopes, shape):
        """Sums of the slopes of what heads share, of the shape of that."""
        if slopes.shape == shape:
            return slopes
        batch, length, heads, width = shape
        return ops.reshape(self.sum(ops.reshape(slopes, (batch, length, heads, -1, width)), 3), shape)
