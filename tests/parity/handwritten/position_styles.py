"""Cases of a small decoder with many styles of positions: tables, angles and biases."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat
from support.handwritten_case import BLOCK, VOCABULARY, Case

D, H, HD = 24, 3, 8


class LM(nn.Module):
    """Blocks of attention(x) and a feedforward; `positions(x)` is applied to the embeddings if there are any."""

    def __init__(self, attention, positions=None, scale=1.0, layers=1):
        super().__init__()
        self.emb, self.positions, self.scale = nn.Embedding(VOCABULARY, D), positions() if positions else None, scale
        self.attns = nn.ModuleList(attention() for _ in range(layers))
        self.ffs = nn.ModuleList(nn.Sequential(nn.Linear(D, 48), nn.ReLU(), nn.Linear(48, D)) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2 * layers))
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, idx):
        x = self.emb(idx) * self.scale
        if self.positions is not None:
            x = self.positions(x)
        for i in range(len(self.attns)):
            x = self.norms[2 * i](x + self.attns[i](x))
            x = self.norms[2 * i + 1](x + self.ffs[i](x))
        return self.out(x)


class QKV(nn.Module):
    def __init__(self, head=HD):
        super().__init__()
        self.head = head
        self.qkv, self.o = nn.Linear(D, 3 * H * head), nn.Linear(H * head, D)

    def heads(self, x):
        B, T, _ = x.shape
        return self.qkv(x).view(B, T, 3, H, self.head).permute(2, 0, 3, 1, 4).unbind(0)

    def join(self, y):
        return self.o(y.transpose(1, 2).flatten(2))


class Plain(QKV):
    def forward(self, x):
        return self.join(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


# -- added to the embeddings -----------------------------------------------------------------------------------------


class Buffer(nn.Module):
    """pe[:, :x.size(1)], with requires_grad_(False) as the Annotated Transformer has it."""

    def __init__(self, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        pe = torch.zeros(max_len, D)
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, D, 2) * -(math.log(10000.0) / D))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        x = x + self.pe[:, : x.size(1)].requires_grad_(False)
        return self.dropout(x)


class InForward(nn.Module):
    """Computed in forward: arange, powers, sin and cos interleaved by assignment."""

    def forward(self, x):
        seq_len = x.size(1)
        position = torch.arange(seq_len, dtype=torch.float, device=x.device).reshape(1, -1, 1)
        even_i = torch.arange(0, D, 2).float()
        denominator = torch.pow(10000, even_i / D)
        pe = torch.zeros(1, seq_len, D)
        pe[:, :, 0::2] = torch.sin(position / denominator)
        pe[:, :, 1::2] = torch.cos(position / denominator)
        return x + pe


class Stacked(nn.Module):
    """Even and odd stacked and flattened; the table is as long as the model may be, then cut."""

    def forward(self, x):
        even_i = torch.arange(0, D, 2).float()
        position = torch.arange(BLOCK).reshape(BLOCK, 1)
        denominator = torch.pow(10000, even_i / D)
        stacked = torch.stack([torch.sin(position / denominator), torch.cos(position / denominator)], dim=2)
        pe = torch.flatten(stacked, start_dim=1, end_dim=2)
        return x + pe[: x.shape[1], :]


class TensorToTensor(nn.Module):
    """sin and cos side by side; positions start at 1, as in fairseq; einsum for the outer product."""

    def forward(self, x):
        half = D // 2
        freq = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
        angles = torch.einsum("i,j->ij", torch.arange(1, x.shape[1] + 1).float(), freq)
        return x + torch.cat((angles.sin(), angles.cos()), dim=-1)[None]


class ModuloTable(nn.Module):
    """A Python list of tables; the positions repeated for each row of the batch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BLOCK, D)

    def forward(self, x):
        batch_size, trg_len = x.shape[0], x.shape[1]
        pos = torch.arange(0, trg_len).unsqueeze(0).repeat(batch_size, 1)
        return x + self.table(pos)


# -- rotary ----------------------------------------------------------------------------------------------------------


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class HalfRotary(QKV):
    """cos and sin cached for the longest length and cut; half of each head rotated only, as GPT-NeoX."""

    def __init__(self):
        super().__init__(head=16)
        inv_freq = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        emb = torch.outer(torch.arange(BLOCK).float(), inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", emb.cos()[None, None], persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, None], persistent=False)

    def forward(self, x):
        q, k, v = self.heads(x)
        cos, sin = self.cos_cached[:, :, : x.size(1), ...], self.sin_cached[:, :, : x.size(1), ...]
        (q, q_pass), (k, k_pass) = (q[..., :8], q[..., 8:]), (k[..., :8], k[..., 8:])
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        q, k = torch.cat((q, q_pass), -1), torch.cat((k, k_pass), -1)
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class InterleavedStack(QKV):
    """GPT-J: rotate every two by stack and flatten; angles in forward, einops' repeat."""

    def rotate(self, x, sin, cos):
        x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
        rotated = torch.stack((-x2, x1), dim=-1).flatten(-2)
        return x * cos + rotated * sin

    def forward(self, x):
        q, k, v = self.heads(x)
        t = torch.arange(x.shape[1], dtype=torch.float32)
        freqs = torch.einsum("i,j->ij", t, 10000 ** -(torch.arange(0, HD, 2).float() / HD))
        freqs = repeat(freqs, "n d -> n (d r)", r=2)
        sin, cos = freqs.sin(), freqs.cos()
        y = F.scaled_dot_product_attention(self.rotate(q, sin, cos), self.rotate(k, sin, cos), v, is_causal=True)
        return self.join(y)


class InterleavedSlices(QKV):
    """Written into an empty tensor by slices; queries and keys normalised before (QK-norm)."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(HD), nn.LayerNorm(HD)
        theta = 10000 ** (-2 * torch.arange(HD // 2) / HD)
        m_theta = torch.outer(torch.arange(BLOCK), theta)
        self.register_buffer("cos", m_theta.cos())
        self.register_buffer("sin", m_theta.sin())

    def rotate(self, x):
        seq_len = x.shape[-2]
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        out = torch.empty_like(x)
        out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
        return out

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = self.rotate(self.q_norm(q)), self.rotate(self.k_norm(k))
        mask = torch.tril(torch.ones(x.size(1), x.size(1))).view(1, 1, x.size(1), x.size(1))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(HD)
        att = att.masked_fill(mask == 0, torch.finfo(att.dtype).min)
        return self.join(F.softmax(att, dim=-1) @ v)


class LabmlRotary(QKV):
    """Time first in the rotation, (T, B, H, D); the cache made in forward up to the length."""

    def rotate(self, x):
        seq_len, d = x.shape[0], x.shape[3]
        theta = 1.0 / (10_000 ** (torch.arange(0, d, 2).float() / d))
        idx_theta = torch.einsum("n,d->nd", torch.arange(seq_len).float(), theta)
        idx_theta2 = torch.cat([idx_theta, idx_theta], dim=1)
        cos, sin = idx_theta2.cos()[:, None, None, :], idx_theta2.sin()[:, None, None, :]
        neg_half_x = torch.cat([-x[:, :, :, d // 2 :], x[:, :, :, : d // 2]], dim=-1)
        return (x * cos[: x.shape[0]]) + (neg_half_x * sin[: x.shape[0]])

    def forward(self, x):
        x = x.transpose(0, 1)
        T, B, _ = x.shape
        q, k, v = self.qkv(x).view(T, B, 3, H, HD).unbind(2)
        q, k = self.rotate(q), self.rotate(k)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / math.sqrt(HD)
        mask = torch.tril(torch.ones(T, T)).bool()[:, :, None, None]
        attn = torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=1)
        y = torch.einsum("ijbh,jbhd->ibhd", attn, v)
        return self.o(y.reshape(T, B, -1)).transpose(0, 1)


class XPos(QKV):
    """Rotary with a scale that grows with the position for queries and shrinks for keys."""

    def forward(self, x):
        q, k, v = self.heads(x)
        t = torch.arange(x.shape[1]).float()
        freqs = torch.outer(t, 10000 ** -(torch.arange(0, HD, 2).float() / HD))
        freqs = torch.cat((freqs, freqs), -1)
        base = (torch.arange(0, HD, 2) + 0.4 * HD) / (1.4 * HD)
        scale = (base ** ((t - 0) / 512)[:, None]).repeat(1, 2)
        cos, sin = freqs.cos(), freqs.sin()
        q = q * cos * scale + rotate_half(q) * sin * scale
        k = k * cos / scale + rotate_half(k) * sin / scale
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))


# -- biases ----------------------------------------------------------------------------------------------------------


class Alibi(QKV):
    """Press et al.'s slopes; the distances as floats added to scores, masked by triu."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([2 ** (-8.0 * (i + 1) / H) for i in range(H)]).view(H, 1, 1))

    def forward(self, x):
        T = x.size(1)
        q, k, v = self.heads(x)
        x_pos, y_pos = torch.arange(T)[None, :], torch.arange(T)[:, None]
        bias = (self.slopes * (x_pos - y_pos)).unsqueeze(0)
        score = (q @ k.transpose(-1, -2)) / math.sqrt(HD) + bias
        score = score.masked_fill(torch.triu(torch.ones(T, T), diagonal=1) == 1, float("-inf"))
        return self.join(F.softmax(score, dim=-1) @ v)


class AlibiBuffer(QKV):
    """The mask and the slopes in one buffer, as the paper's own code; SDPA adds it."""

    def __init__(self):
        super().__init__()
        slopes = torch.tensor([0.5, 0.25, 0.125])
        alibi = slopes.unsqueeze(1).unsqueeze(1) * torch.arange(BLOCK).unsqueeze(0).unsqueeze(0).expand(H, -1, -1)
        future = torch.triu(torch.full((BLOCK, BLOCK), float("-inf")), 1)
        self.register_buffer("mask", future.unsqueeze(0) + alibi)

    def forward(self, x):
        T = x.size(1)
        return self.join(F.scaled_dot_product_attention(*self.heads(x), attn_mask=self.mask[:, :T, :T]))


class T5Bias(QKV):
    """Relative buckets, logarithmic beyond half of them, an embedding per head."""

    def __init__(self, num_buckets=8, max_distance=16):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, H)

    def bucket(self, relative_position):
        n = -relative_position
        n = torch.max(n, torch.zeros_like(n))
        max_exact = self.num_buckets // 2
        is_small = n < max_exact
        val_if_large = (
            max_exact
            + (
                torch.log(n.float() / max_exact)
                / math.log(self.max_distance / max_exact)
                * (self.num_buckets - max_exact)
            ).long()
        )
        val_if_large = torch.min(val_if_large, torch.full_like(val_if_large, self.num_buckets - 1))
        return torch.where(is_small, n, val_if_large)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = self.heads(x)
        q_pos, k_pos = torch.arange(n, dtype=torch.long), torch.arange(n, dtype=torch.long)
        rel_pos = rearrange(k_pos, "j -> 1 j") - rearrange(q_pos, "i -> i 1")
        bias = rearrange(self.relative_attention_bias(self.bucket(rel_pos)), "i j h -> 1 h i j")
        sim = torch.einsum("bhid,bhjd->bhij", q, k) + bias
        sim = sim.masked_fill(rel_pos > 0, -1e9)
        return self.join(torch.einsum("bhij,bhjd->bhid", sim.softmax(-1), v))


class Shaw(QKV):
    """Embeddings of clipped differences for keys and values, Shaw et al. 2018, by einsum."""

    def __init__(self, clip=5):
        super().__init__()
        self.clip = clip
        self.rel_k, self.rel_v = (nn.Parameter(torch.randn(2 * clip + 1, HD) * 0.4) for _ in range(2))

    def table(self, length, which):
        range_vec = torch.arange(length)
        distance = range_vec[None, :] - range_vec[:, None]
        clipped = torch.clamp(distance, -self.clip, self.clip) + self.clip
        return which[clipped]

    def forward(self, x):
        T = x.shape[1]
        q, k, v = self.heads(x)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        scores = scores + torch.einsum("bhqd,qkd->bhqk", q, self.table(T, self.rel_k))
        scores = (scores / HD**0.5).masked_fill(torch.ones(T, T).tril() == 0, -1e10)
        attn = scores.softmax(-1)
        y = torch.einsum("bhqk,bhkd->bhqd", attn, v) + torch.einsum("bhqk,qkd->bhqd", attn, self.table(T, self.rel_v))
        return self.join(y)


class ShawMatmul(Shaw):
    """The same as the translation of tensor2tensor has it: permuted to (T, B · H, D) and multiplied as matrices."""

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.heads(x)
        r_q = q.permute(2, 0, 1, 3).contiguous().view(T, B * H, HD)
        scores2 = torch.matmul(r_q, self.table(T, self.rel_k).transpose(1, 2)).transpose(0, 1)
        scores = (torch.matmul(q, k.permute(0, 1, 3, 2)) + scores2.contiguous().view(B, H, T, T)) / math.sqrt(HD)
        attn = torch.softmax(scores.masked_fill(torch.ones(T, T).tril() == 0, -1e10), dim=-1)
        weights = attn.permute(2, 0, 1, 3).contiguous().view(T, B * H, T)
        second = torch.matmul(weights, self.table(T, self.rel_v)).transpose(0, 1).contiguous().view(B, H, T, HD)
        return self.join(torch.matmul(attn, v) + second)


class MusicTransformer(QKV):
    """Relative attention by skewing: q · Eᵀ, padded by one column, reshaped, sliced (Huang et al. 2018)."""

    def __init__(self):
        super().__init__()
        self.Er = nn.Parameter(torch.randn(BLOCK, HD) * 0.4)

    def skew(self, QEr):
        padded = F.pad(QEr, (1, 0))
        batch_size, num_heads, num_rows, num_cols = padded.shape
        reshaped = padded.reshape(batch_size, num_heads, num_cols, num_rows)
        return reshaped[:, :, 1:, :]

    def forward(self, x):
        T = x.size(1)
        q, k, v = self.heads(x)
        start = BLOCK - T
        Er_t = self.Er[start:, :].transpose(0, 1)
        QEr = torch.matmul(q, Er_t)
        attn = (torch.matmul(q, k.transpose(2, 3)) + self.skew(QEr)) / math.sqrt(HD)
        attn = attn.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
        return self.join(torch.matmul(F.softmax(attn, dim=-1), v))


class TransformerXL(QKV):
    """Content and position terms with the biases u and v, the second shifted by `_rel_shift` (Dai et al. 2019); time
    first, (T, B, H, D), as published, without memory."""

    def __init__(self):
        super().__init__()
        self.r_net = nn.Linear(D, D, bias=False)
        self.r_w_bias, self.r_r_bias = nn.Parameter(torch.randn(H, HD)), nn.Parameter(torch.randn(H, HD))
        self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, D, 2.0) / D)))

    def _rel_shift(self, x):
        zero_pad = torch.zeros((x.size(0), 1, *x.size()[2:]), device=x.device, dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=1)
        x_padded = x_padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].view_as(x)

    def forward(self, x):
        w = x.transpose(0, 1)
        qlen, bsz = w.size(0), w.size(1)
        pos_seq = torch.arange(qlen - 1, -1, -1.0)
        sinusoid = torch.outer(pos_seq, self.inv_freq)
        r = torch.cat([sinusoid.sin(), sinusoid.cos()], dim=-1)
        r_head_k = self.r_net(r).view(qlen, H, HD)
        q, k, v = (t.view(qlen, bsz, H, HD) for t in torch.chunk(self.qkv(w), 3, dim=-1))
        AC = torch.einsum("ibnd,jbnd->ijbn", (q + self.r_w_bias, k))
        BD = self._rel_shift(torch.einsum("ibnd,jnd->ijbn", (q + self.r_r_bias, r_head_k)))
        attn_score = (AC + BD) * (1 / HD**0.5)
        mask = torch.triu(torch.ones(qlen, qlen), diagonal=1).bool()[:, :, None]
        attn_score = attn_score.float().masked_fill(mask[:, :, :, None], -float("inf")).type_as(attn_score)
        attn_prob = F.softmax(attn_score, dim=1)
        attn_vec = torch.einsum("ijbn,jbnd->ibnd", (attn_prob, v))
        attn_vec = attn_vec.contiguous().view(qlen, bsz, H * HD)
        return self.o(attn_vec).transpose(0, 1)


class DynamicBias(QKV):
    """A small network of the distance gives the bias of each head, looked up by index."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, H))

    def forward(self, x):
        n = x.shape[1]
        q, k, v = self.heads(x)
        seq = torch.arange(n)
        indices = rearrange(seq, "i -> i 1") - rearrange(seq, "j -> 1 j") + (n - 1)
        pos = rearrange(torch.arange(-n + 1, n).float(), "n -> n 1")
        bias = rearrange(self.mlp(pos)[indices], "i j h -> h i j")
        dots = q @ k.transpose(-1, -2) * HD**-0.5 + bias
        dots = dots.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.finfo(dots.dtype).max)
        return self.join(dots.softmax(-1) @ v)


class Sandwich(QKV):
    """Kerple's logarithmic bias, with learned parameters."""

    def __init__(self):
        super().__init__()
        self.p, self.a = nn.Parameter(torch.rand(H, 1, 1) + 0.5), nn.Parameter(torch.rand(H, 1, 1) + 0.5)

    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.heads(x)
        diff = torch.tril(torch.arange(t).view(t, 1).repeat(1, t) + torch.arange(0, -t, -1))
        bias = -self.p.clamp(min=0.01) * torch.log(1 + self.a.clamp(min=0.01) * diff)
        scores = q @ k.mT / HD**0.5 + bias
        return self.join(scores.masked_fill(~torch.ones(t, t).tril().bool(), -float("inf")).softmax(-1) @ v)


def lm(attention, positions=None, **options):
    return lambda: LM(attention, positions, **options)


CASES = [
    Case("no-positions", lm(Plain)),
    Case("sinusoidal-buffer", lm(Plain, Buffer, scale=math.sqrt(D))),
    Case("sinusoidal-in-forward", lm(Plain, InForward)),
    Case("sinusoidal-stacked", lm(Plain, Stacked)),
    Case("sinusoidal-from-one", lm(Plain, TensorToTensor)),
    Case("positions-repeated", lm(Plain, ModuloTable)),
    Case("rotary-half", lm(HalfRotary)),
    Case("rotary-stack", lm(InterleavedStack)),
    Case("rotary-slices-qk-norm", lm(InterleavedSlices), exports_file=True),
    Case("rotary-time-first", lm(LabmlRotary)),
    Case("xpos", lm(XPos)),
    Case("alibi", lm(Alibi, layers=2), exports_file=True),
    Case("alibi-buffer", lm(AlibiBuffer)),
    Case("t5-bias", lm(T5Bias)),
    Case("shaw", lm(Shaw, layers=2), exports_file=True, seed=8),
    Case("shaw-matmul", lm(ShawMatmul)),
    Case("music-transformer", lm(MusicTransformer)),
    Case("transformer-xl", lm(TransformerXL), exports_file=True),
    Case("dynamic-bias", lm(DynamicBias)),
    Case("kerple", lm(Sandwich)),
]
