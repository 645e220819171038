"""The gated delta rule by its definition, one token after the other, in float64: outputs and gradients."""

import numpy as np


def recurrent(query, key, value, decay, rate, segments, continued, slopes):
    """Outputs `[S, H, dv]` of a row and the gradients of its inputs, for slopes of the outputs.

    Queries, keys, values `[S, H, d]`, log decays and rates `[S, H]`; a segment begins with the state at the end of the
    one that it continues, if that has tokens, or with none.
    """
    length, heads, dim = query.shape
    before, after, outputs = {}, {}, np.zeros_like(value)
    ends, parents = {}, {}
    for token in range(length):
        own, other = segments[token], continued[token]
        parents[token] = ends.get(own, ends.get(other))
        ends[own] = token
        start = after[parents[token]] if parents[token] is not None else np.zeros((heads, dim, value.shape[-1]))
        before[token] = start
        left = np.exp(decay[token])[:, None, None] * start
        learned = rate[token][:, None] * (value[token] - np.einsum("hkv,hk->hv", left, key[token]))
        after[token] = left + key[token][:, :, None] * learned[:, None, :]
        outputs[token] = np.einsum("hkv,hk->hv", after[token], query[token])
    gradients = [np.zeros_like(one) for one in (query, key, value, decay, rate)]
    dquery, dkey, dvalue, ddecay, drate = gradients
    dstates = {token: np.zeros((heads, dim, value.shape[-1])) for token in range(length)}
    for token in reversed(range(length)):
        slope, kept = slopes[token], np.exp(decay[token])[:, None, None]
        left = kept * before[token]
        error = value[token] - np.einsum("hkv,hk->hv", left, key[token])
        learned = rate[token][:, None] * error
        dquery[token] = np.einsum("hkv,hv->hk", after[token], slope)
        dstate = dstates[token] + query[token][:, :, None] * slope[:, None, :]
        dlearned = np.einsum("hkv,hk->hv", dstate, key[token])
        dkey[token] = np.einsum("hkv,hv->hk", dstate, learned)
        drate[token] = (dlearned * error).sum(-1)
        dvalue[token] = rate[token][:, None] * dlearned
        dkey[token] -= np.einsum("hkv,hv->hk", left, dvalue[token])
        dleft = dstate - key[token][:, :, None] * dvalue[token][:, None, :]
        ddecay[token] = (dleft * left).sum((1, 2))
        if parents[token] is not None:
            dstates[parents[token]] += kept * dleft
    return outputs, gradients


def last_ancestors(segments, continued, number):
    """Places of the last ``number`` ancestors of each token of a row, counted from 1; 0 for none."""
    parents, ends = [], {}
    for token, own in enumerate(segments):
        parents.append(ends.get(own, ends.get(continued[token], -1)) + 1)
        ends[own] = token
    found = np.zeros((len(segments), number), int)
    for token in range(len(segments)):
        at = token + 1
        for back in range(number):
            at = parents[at - 1] if at else 0
            found[token, back] = at
    return found
