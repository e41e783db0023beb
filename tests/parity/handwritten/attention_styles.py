"""Cases of a decoder with many styles of attention: projections, products and masks."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import einsum as einops_einsum
from einops import rearrange, repeat
from einops.layers.torch import Rearrange
from support.handwritten_case import BLOCK, VOCABULARY, Case

D, H, HD = 24, 3, 8


class Decoder(nn.Module):
    """Pre-norm blocks around `attention()`, which is called with x alone."""

    def __init__(self, attention, positions=True, layers=1):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, D)
        self.pos = nn.Embedding(BLOCK, D) if positions else None
        self.layers = nn.ModuleList([])
        for _ in range(layers):
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(D),
                        attention(),
                        nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)),
                    ]
                )
            )
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, idx):
        x = self.emb(idx)
        if self.pos is not None:
            x = x + self.pos.weight[: idx.shape[1]]
        for norm, attn, ff in self.layers:
            x = attn(norm(x)) + x
            x = ff(x) + x
        return self.head(self.norm(x))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.proj = nn.Linear(D, D)

    def joined(self, y):
        return self.proj(y.transpose(1, 2).reshape(y.shape[0], -1, D))


# -- one packed projection -------------------------------------------------------------------------------------------


class ReshapePermuteUnbind(Packed):
    """(B, T, 3, H, D) → (3, B, H, T, D), and a mask of −inf from a full tensor."""

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * HD**-0.5) @ k.transpose(-2, -1)
        attn = attn + torch.full((T, T), float("-inf"), device=x.device).triu(1)
        return self.joined(attn.softmax(dim=-1) @ v)


class Indexed(Packed):
    """qkv[0], qkv[1], qkv[2]; triu as booleans."""

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, H, HD).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(HD)
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), diagonal=1)
        scores.masked_fill_(mask, torch.finfo(scores.dtype).min)
        return self.joined(torch.softmax(scores, dim=-1).matmul(v))


class ByHeadChunk(Packed):
    """Each head's query, key and value side by side, as GPT-NeoX packs them; positions compared."""

    def forward(self, x):
        B, T, _ = x.size()
        q, k, v = self.qkv(x).view(B, T, H, 3 * HD).transpose(1, 2).chunk(3, dim=-1)
        i = torch.arange(T, device=x.device)[:, None]
        j = torch.arange(T, device=x.device)[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=j <= i)
        return self.joined(y)


class Unflattened(Packed):
    """unflatten, a permutation, chunks that keep an axis of size one; SDPA with a mask of floats."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((BLOCK, BLOCK), -1e9).triu(1))

    def forward(self, x):
        T = x.shape[1]
        q, k, v = (t.squeeze(2) for t in self.qkv(x).unflatten(-1, (3, H, HD)).chunk(3, dim=2))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self.joined(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:T, :T].unsqueeze(0)))


class Sliced(Packed):
    """Columns of one product; a mask cached on first use and made again when the length changes."""

    def forward(self, x):
        B, T, C = x.shape
        y = self.qkv(x)
        q, k, v = y[..., :C], y[..., C : 2 * C], y[:, :, 2 * C :]
        q, k, v = [t.contiguous().view(B, -1, H, HD).permute(0, 2, 1, 3) for t in (q, k, v)]
        mask = 1.0 - torch.tril(torch.ones((1, 1, T, T), device=x.device))
        w = torch.softmax(q.matmul(k.transpose(3, 2)) / HD**0.5 + mask * -10000.0, -1)
        return self.proj(w.matmul(v).permute(0, 2, 1, 3).contiguous().view(B, T, C))


# -- einsum and einops -----------------------------------------------------------------------------------------------


class Lucidrains(nn.Module):
    """x-transformers' and vit-pytorch's hand: chunk, rearrange, `dots`, max_neg_value."""

    def __init__(self):
        super().__init__()
        self.scale = HD**-0.5
        self.to_qkv = nn.Linear(D, 3 * D, bias=False)
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))

    def forward(self, x):
        n, device, h = x.shape[1], x.device, H
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=h) for t in qkv)
        q = q * self.scale
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k)
        causal_mask = torch.ones((n, n), dtype=torch.bool, device=device).triu(1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        out = rearrange(out, "b h n d -> b n (h d)")
        return self.to_out(out)


class PaLM(nn.Module):
    """Parallel block inside: one fused projection of query heads, one key, one value and the feedforward's two halves;
    multi-query attention."""

    def __init__(self):
        super().__init__()
        self.fused_dims = (D, HD, HD, 96)
        self.fused_attn_ff_proj = nn.Linear(D, sum(self.fused_dims), bias=False)
        self.attn_out = nn.Linear(D, D, bias=False)
        self.ff_out = nn.Linear(48, D, bias=False)

    def forward(self, x):
        n, device, h = x.shape[1], x.device, H
        q, k, v, ff = self.fused_attn_ff_proj(x).split(self.fused_dims, dim=-1)
        q = rearrange(q, "b n (h d) -> b h n d", h=h)
        q = q * HD**-0.5
        sim = torch.einsum("b h i d, b j d -> b h i j", q, k)
        mask = torch.ones((n, n), device=device, dtype=torch.bool).triu(1)
        sim = sim.masked_fill(mask, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b j d -> b h i d", attn, v)
        out = rearrange(out, "b h n d -> b n (h d)")
        gate_in, gate = ff.chunk(2, dim=-1)
        return self.attn_out(out) + self.ff_out(F.silu(gate) * gate_in)


class EinopsThree(nn.Module):
    """'(three h d)' taken apart in one pattern; einops' own einsum; Rearrange as a layer."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Sequential(nn.Linear(D, 3 * D), Rearrange("b t (three h d) -> three b h t d", three=3, h=H))
        self.out = nn.Sequential(Rearrange("b h t d -> b t (h d)"), nn.Linear(D, D))
        self.register_buffer("mask", torch.tril(torch.ones(BLOCK, BLOCK)).bool())

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = einops_einsum(q, k, "b h i d, b h j d -> b h i j") / math.sqrt(HD)
        keep = rearrange(self.mask[: x.size(1), : x.size(1)], "i j -> 1 1 i j")
        weights = torch.where(keep, scores, torch.tensor(float("-inf"), device=x.device)).softmax(-1)
        return self.out(einops_einsum(weights, v, "b h i j, b h j d -> b h i d"))


class Aladdin(nn.Module):
    """ "nqhd,nkhd->nhqk", reshaped heads, an expanded mask with −1e20, queries divided by the width's root."""

    def __init__(self):
        super().__init__()
        self.values, self.keys, self.queries = (nn.Linear(D, D) for _ in range(3))
        self.fc_out = nn.Linear(D, D)

    def forward(self, x):
        N, T = x.shape[0], x.shape[1]
        mask = torch.tril(torch.ones((T, T))).expand(N, 1, T, T)
        values = self.values(x).reshape(N, T, H, HD)
        keys = self.keys(x).reshape(N, T, H, HD)
        queries = self.queries(x).reshape(N, T, H, HD)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / (D ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, T, H * HD)
        return self.fc_out(out)


class ParameterEinsum(nn.Module):
    """Weights of three axes, (heads, width, head), as the interpretability tutorials have them."""

    def __init__(self):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(H, D, HD) * 0.2) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(H, HD, D) * 0.2)
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.randn(H, HD) * 0.1) for _ in range(3))
        self.b_O = nn.Parameter(torch.zeros(D))
        self.register_buffer("IGNORE", torch.tensor(-1e5))

    def forward(self, x):
        q = (
            einops_einsum(x, self.W_Q, "batch posn d_model, nheads d_model d_head -> batch posn nheads d_head")
            + self.b_Q
        )
        k = torch.einsum("bpm,hmd->bphd", x, self.W_K) + self.b_K
        v = torch.einsum("bpm,hmd->bphd", x, self.W_V) + self.b_V
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores = self.apply_causal_mask(scores / HD**0.5)
        pattern = scores.softmax(-1)
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O

    def apply_causal_mask(self, attn_scores):
        all_ones = torch.ones(attn_scores.size(-2), attn_scores.size(-1), device=attn_scores.device)
        mask = torch.triu(all_ones, diagonal=1).bool()
        attn_scores.masked_fill_(mask, self.IGNORE)
        return attn_scores


class EinsumGrouped(nn.Module):
    """Grouped queries without repeating keys: "b g r i d, b g j d"."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, 4 * HD), nn.Linear(D, 2 * 2 * HD), nn.Linear(4 * HD, D)

    def forward(self, x):
        n = x.shape[1]
        q = rearrange(self.q(x), "b n (g r d) -> b g r n d", g=2, r=2)
        k, v = rearrange(self.kv(x), "b n (two g d) -> two b g n d", two=2, g=2)
        sim = torch.einsum("b g r i d, b g j d -> b g r i j", q, k) * HD**-0.5
        sim = sim.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -1e9)
        out = torch.einsum("b g r i j, b g j d -> b g r i d", sim.softmax(-1), v)
        return self.o(rearrange(out, "b g r n d -> b n (g r d)"))


class RepeatedGroups(nn.Module):
    """Grouped queries with einops' repeat, and with repeat_interleave."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(D, 4 * HD),
            nn.Linear(D, 2 * HD),
            nn.Linear(D, 2 * HD),
            nn.Linear(4 * HD, D),
        )

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, 4, HD).transpose(1, 2)
        k = repeat(rearrange(self.k(x), "b t (g d) -> b g t d", g=2), "b g t d -> b (g r) t d", r=2)
        v = self.v(x).view(B, T, 2, HD).transpose(1, 2).repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


# -- heads merged into the batch, time first -------------------------------------------------------------------------


class MergedHeads(nn.Module):
    """(B · H, T, D): bmm, scaled queries, a float mask repeated for every head."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def _shape(self, tensor, seq_len, bsz):
        return tensor.view(bsz, seq_len, H, HD).transpose(1, 2).contiguous()

    def forward(self, x):
        bsz, tgt_len, _ = x.size()
        q = self._shape(self.q_proj(x) * HD**-0.5, tgt_len, bsz).view(bsz * H, -1, HD)
        k = self._shape(self.k_proj(x), -1, bsz).view(bsz * H, -1, HD)
        v = self._shape(self.v_proj(x), -1, bsz).view(bsz * H, -1, HD)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        mask = torch.full((tgt_len, tgt_len), torch.finfo(x.dtype).min)
        mask_cond = torch.arange(mask.size(-1))
        mask.masked_fill_(mask_cond < (mask_cond + 1).view(mask.size(-1), 1), 0)
        mask = mask[None, None, :, :].expand(bsz, 1, tgt_len, tgt_len)
        attn_weights = attn_weights.view(bsz, H, tgt_len, tgt_len) + mask
        attn_weights = attn_weights.view(bsz * H, tgt_len, tgt_len)
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_output = torch.bmm(attn_weights, v)
        attn_output = attn_output.view(bsz, H, tgt_len, HD).transpose(1, 2)
        return self.out_proj(attn_output.reshape(bsz, tgt_len, D))


class HeadsInFront(nn.Module):
    """Heads split off by chunks and concatenated along the batch, as the first repositories do; softmax of a tile."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q = torch.cat(torch.split(torch.relu(self.q(x)), HD, dim=2), dim=0)
        k = torch.cat(torch.split(torch.relu(self.k(x)), HD, dim=2), dim=0)
        v = torch.cat(torch.split(torch.relu(self.v(x)), HD, dim=2), dim=0)
        out = torch.bmm(q, k.permute(0, 2, 1)) / HD**0.5
        tril = torch.tril(torch.ones_like(out[0]))
        masks = tril.unsqueeze(0).repeat(out.size(0), 1, 1)
        out = torch.where(masks == 0, torch.ones_like(out) * (-(2**32) + 1), out)
        out = torch.bmm(F.softmax(out, -1), v)
        return self.o(torch.cat(torch.split(out, x.size(0), dim=0), dim=2))


class MergedBaddbmm(nn.Module):
    """baddbmm with ALiBi as its first operand, repeated over the merged axes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.dense = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8 * (i + 1) / H) for i in range(H)]))

    def forward(self, x):
        b, t, _ = x.shape
        fused = self.qkv(x).view(b, t, H, 3, HD)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        alibi = (self.slopes[:, None] * torch.arange(t)[None, :])[None].expand(b, H, t).reshape(b * H, 1, t)
        q = q.transpose(1, 2).reshape(b * H, t, HD)
        k = k.permute(0, 2, 3, 1).reshape(b * H, HD, t)
        v = v.transpose(1, 2).reshape(b * H, t, HD)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=HD**-0.5).view(b, H, t, t)
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        probs = F.softmax(torch.masked_fill(scores, mask, torch.finfo(scores.dtype).min), dim=-1, dtype=torch.float32)
        context = torch.bmm(probs.view(b * H, t, t), v).view(b, H, t, HD)
        return self.dense(context.transpose(1, 2).reshape(b, t, H * HD))


class FairseqAttention(nn.Module):
    """Time first inside: (T, B, C) → (B · H, T, D)."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.scaling = HD**-0.5

    def forward(self, x, attn_mask):
        tgt_len, bsz, embed_dim = x.size()
        q = self.q_proj(x)
        q *= self.scaling
        k, v = self.k_proj(x), self.v_proj(x)
        q = q.contiguous().view(tgt_len, bsz * H, HD).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * H, HD).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * H, HD).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        assert list(attn_weights.size()) == [bsz * H, tgt_len, tgt_len]
        attn_mask = attn_mask.unsqueeze(0)
        attn_weights += attn_mask
        attn_probs = F.softmax(attn_weights.float(), dim=-1).type_as(attn_weights)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        attn = self.out_proj(attn)
        return attn, attn_weights.view(bsz, H, tgt_len, tgt_len).transpose(1, 0)


class FairseqDecoder(nn.Module):
    """Batch first outside, time first inside; `fill_with_neg_inf`; the weights of the last layer are returned too."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, D, padding_idx=0)
        self.embed_positions = nn.Embedding(BLOCK + 1, D, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.ModuleList([FairseqAttention(), nn.LayerNorm(D), nn.Linear(D, 48), nn.Linear(48, D), nn.LayerNorm(D)])
            for _ in range(2)
        )
        self.output_projection = nn.Linear(D, VOCABULARY, bias=False)
        self.output_projection.weight = self.embed_tokens.weight

    def forward(self, prev_output_tokens):
        mask = prev_output_tokens.ne(0).int()
        positions = self.embed_positions((torch.cumsum(mask, dim=1).type_as(mask) * mask).long())
        x = math.sqrt(D) * self.embed_tokens(prev_output_tokens) + positions
        x = x.transpose(0, 1)
        dim = x.size(0)
        future = torch.triu(torch.zeros([dim, dim]).float().fill_(float("-inf")).type_as(x), 1)
        attn = None
        for attention, norm, fc1, fc2, final in self.layers:
            residual = x
            x, attn = attention(x, future)
            x = norm(residual + x)
            x = final(x + fc2(F.relu(fc1(x))))
        x = x.transpose(0, 1)
        return self.output_projection(x), {"attn": [attn], "inner_states": None}


# -- torch's own modules ---------------------------------------------------------------------------------------------


class TorchAttention(nn.Module):
    def __init__(self, mask, need_weights=True, batch_first=True, **options):
        super().__init__()
        self.mha = nn.MultiheadAttention(D, H, dropout=0.1, batch_first=batch_first)
        self.mask, self.need_weights, self.batch_first, self.options = mask, need_weights, batch_first, options

    def forward(self, x):
        if not self.batch_first:
            x = x.transpose(0, 1)
        T = x.size(1 if self.batch_first else 0)
        y, _ = self.mha(x, x, x, attn_mask=self.mask(T), need_weights=self.need_weights, **self.options)
        return y if self.batch_first else y.transpose(0, 1)


def bool_mask(T):
    return torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)


def float_mask(T):
    return nn.Transformer.generate_square_subsequent_mask(T)


def old_mask(sz):
    mask = (torch.triu(torch.ones(sz, sz)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


class TorchLayers(nn.Module):
    """A language model out of nn.TransformerEncoder with a mask, pre-norm, gelu, with padding masks."""

    def __init__(self, norm_first, activation, batch_first=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            D, H, 48, 0.1, activation=activation, batch_first=batch_first, norm_first=norm_first
        )
        self.emb, self.pos = nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(D), enable_nested_tensor=False)
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, idx):
        T = idx.size(1)
        x = self.emb(idx) * math.sqrt(D) + self.pos(torch.arange(T).expand(idx.size(0), T))
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=x.device)
        return self.out(self.encoder(x, mask=mask, src_key_padding_mask=(idx == 0), is_causal=True))


class TimeFirstLayers(nn.Module):
    """PyTorch's tutorial on language modelling: (T, B) in and out, positions added to (T, B, C), mask by keyword."""

    def __init__(self):
        super().__init__()
        position = torch.arange(BLOCK).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
        pe = torch.zeros(BLOCK, 1, D)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.transformer_encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 48, 0.2), 1)
        self.embedding, self.linear = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)

    def length(self, src):
        return src.size(0)

    def forward(self, src, src_mask=None):
        src = self.embedding(src) * math.sqrt(D)
        src = src + self.pe[: src.size(0)]
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(self.length(src))
        return self.linear(self.transformer_encoder(src, src_mask))


class TorchTutorial(TimeFirstLayers):
    """As published: `len` makes a number of a free size."""

    def length(self, src):
        return len(src)


class DecoderOnItself(nn.Module):
    """nn.TransformerDecoder as a language model: its memory is its own input, masked as well."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, D), nn.Parameter(torch.randn(1, BLOCK, D))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 48, batch_first=True), 1)
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, idx):
        x = self.emb(idx) + self.pos[:, : idx.size(1), :]
        mask = old_mask(idx.size(1))
        return self.out(self.decoder(tgt=x, memory=x, tgt_mask=mask, memory_mask=mask))


def attention(kind, **options):
    return lambda: Decoder(kind, **options)


CASES = [
    Case("permute-unbind", attention(ReshapePermuteUnbind)),
    Case("qkv-indexed", attention(Indexed)),
    Case("by-head-chunk", attention(ByHeadChunk)),
    Case("unflatten-chunk", attention(Unflattened)),
    Case("sliced", attention(Sliced, positions=False)),
    Case("lucidrains", attention(Lucidrains, layers=2)),
    Case("palm", attention(PaLM)),
    Case("einops-three", attention(EinopsThree)),
    Case("aladdin", attention(Aladdin)),
    Case("einsum-parameters", attention(ParameterEinsum)),
    Case("einsum-grouped", attention(EinsumGrouped)),
    Case("repeated-groups", attention(RepeatedGroups)),
    Case("merged-heads", attention(MergedHeads)),
    Case(
        "heads-in-front",
        attention(HeadsInFront),
        exports_file=True,
        seed=2,
    ),
    Case("merged-baddbmm", attention(MergedBaddbmm, positions=False)),
    Case("fairseq", FairseqDecoder, inputs=("prev_output_tokens",)),
    Case("mha-bool", attention(lambda: TorchAttention(bool_mask))),
    Case("mha-float-no-weights", attention(lambda: TorchAttention(float_mask, need_weights=False, is_causal=True))),
    Case("mha-old-mask-time-first", attention(lambda: TorchAttention(old_mask, batch_first=False))),
    Case(
        "mha-time-first-no-weights", attention(lambda: TorchAttention(bool_mask, need_weights=False, batch_first=False))
    ),
    Case("mha-weights-per-head", attention(lambda: TorchAttention(bool_mask, average_attn_weights=False))),
    Case("torch-layers-pre-gelu", lambda: TorchLayers(True, "gelu"), seed=10),
    Case("torch-layers-post-relu", lambda: TorchLayers(False, "relu")),
    Case("torch-tutorial-time-first", TimeFirstLayers, inputs=("src",), time_first=True),
    Case(
        "torch-tutorial-len",
        TorchTutorial,
        inputs=("src",),
        time_first=True,
        exports_file=True,
    ),
    Case("decoder-on-itself", DecoderOnItself),
]
