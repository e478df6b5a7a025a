"""Interim: dense."""

import torch


def attend(query, key, value, tree, scoring):
    T, S = query.shape[0], key.shape[0]
    dev = query.device
    vis = torch.zeros(S, S, dtype=torch.bool)
    pos = torch.zeros(S, dtype=torch.long)
    for i, n in enumerate(tree.nodes):
        off = 0
        p = n.parent
        while p >= 0:
            m = tree.nodes[p]
            vis[n.start : n.start + n.length, m.start : m.start + m.length] = True
            off += m.length
            p = m.parent
        vis[n.start : n.start + n.length, n.start : n.start + n.length] = torch.ones(
            n.length, n.length, dtype=torch.bool
        ).tril()
        pos[n.start : n.start + n.length] = off + torch.arange(n.length)
    if scoring.window is not None:
        vis &= (pos[:, None] - pos[None]) < scoring.window
    vis = vis[S - T :].to(dev)
    g = query.shape[1] // key.shape[1]
    k = key.repeat_interleave(g, 1).transpose(0, 1)
    v = value.repeat_interleave(g, 1).transpose(0, 1)
    s = (query.transpose(0, 1) @ k.mT) * scoring.scale
    if scoring.softcap:
        s = torch.tanh(s / scoring.softcap) * scoring.softcap
    s = s.masked_fill(~vis, -torch.inf)
    if scoring.sinks is not None:
        s = torch.cat([s, scoring.sinks.to(s.dtype)[:, None, None].expand(-1, T, 1)], -1)
        return (s.softmax(-1)[..., :-1] @ v).transpose(0, 1).to(query.dtype)
    return (s.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
